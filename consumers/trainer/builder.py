"""Sample records in log order -> batches; a record is finished with once everything before it is.

Records wait in the order in which they came. A batch takes them from the front: dropped ones are counted by
reason, repeats and stale ones too (the lag is that of the version being updated now: the hard guarantee), until
`batch_size` can be trained. So (partition, next offset) after a batch is exactly what it and its predecessors
used, and a restart from there counts nothing twice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...schemas.sample import Fate, Sample
from ...schemas.score import Ref
from ...streams.staleness import Lag, is_stale, lag_of

REMEMBERED = 200_000
"""Trajectory ids kept to tell repeats, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A sample that is to be trained."""

    at: Ref
    """Its own place in the samples topic."""
    sample: Sample
    lag: Lag


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step trains."""

    admitted: tuple[Admitted, ...]
    consumed: tuple[tuple[int, int], ...]
    """(partition, next offset) of every partition after this batch."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> records passed over since the previous batch."""
    stale_in_queue: int = 0
    """Of the stale ones: those that were not stale when they were sampled, but went so while they waited."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    at: Ref
    sample: Sample | None
    reason: str | None


class BatchBuilder:
    """Pure: records are offered, batches are taken."""

    def __init__(
        self, batch_size: int, max_lag: int, positions: Mapping[int, int], *, remembered: int = REMEMBERED
    ) -> None:
        """`positions`: partition -> offset where reading starts. `remembered`: how many finished ids are kept."""
        self._remembered = remembered
        self._batch_size, self._max_lag = batch_size, max_lag
        self._next = dict(positions)
        self._finished = dict(positions)
        self._waiting: deque[_Waiting] = deque()
        self._queued: set[str] = set()
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._dropped: Counter[str] = Counter()
        self._stale_in_queue = 0

    @property
    def waiting(self) -> int:
        """Records offered and not finished with."""
        return len(self._waiting)

    def remember(self, trajectory_id: str) -> None:
        """This trajectory was finished with before: another record of it is a repeat."""
        self._seen[trajectory_id] = None
        self._seen.move_to_end(trajectory_id)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)

    def offer(self, partition: int, offset: int, sample: Sample) -> None:
        """The next record of a partition; one that lies before what was offered already is ignored."""
        if offset < self._next.get(partition, 0):
            return
        known = sample.trajectory_id in self._seen or sample.trajectory_id in self._queued
        reason = "duplicate" if known else sample.reason if sample.fate is Fate.DROPPED else None
        if not known:
            self._queued.add(sample.trajectory_id)
        kept = None if known else sample
        self._append(partition, offset, _Waiting(Ref(partition, offset), kept, reason))

    def refuse(self, partition: int, offset: int) -> None:
        """The next record of a partition cannot be read: it is passed over, and is somebody else's to count."""
        if offset >= self._next.get(partition, 0):
            self._append(partition, offset, _Waiting(Ref(partition, offset), None, None))

    def take(self, version: int) -> Batch | None:
        """The next batch for an update of `version`; None until there are enough samples for one."""
        self._drop_front(version)
        if self._trainable(version) < self._batch_size:
            return None
        admitted: list[Admitted] = []
        while len(admitted) < self._batch_size:
            self._drop_front(version)
            item = self._finish()
            assert item.sample is not None
            admitted.append(Admitted(at=item.at, sample=item.sample, lag=_lag(item.sample, version)))
        dropped, self._dropped = dict(self._dropped), Counter()
        in_queue, self._stale_in_queue = self._stale_in_queue, 0
        return Batch(
            admitted=tuple(admitted), consumed=self.consumed, dropped=dropped, stale_in_queue=in_queue
        )

    @property
    def consumed(self) -> tuple[tuple[int, int], ...]:
        """(partition, next offset) of what is finished with, in order of partition."""
        return tuple(sorted(self._finished.items()))

    def _append(self, partition: int, offset: int, item: _Waiting) -> None:
        self._next[partition] = offset + 1
        self._waiting.append(item)

    def _finish(self) -> _Waiting:
        item = self._waiting.popleft()
        self._finished[item.at.partition] = item.at.offset + 1
        if item.sample is not None:
            self._queued.discard(item.sample.trajectory_id)
            self.remember(item.sample.trajectory_id)
        return item

    def _drop_front(self, version: int) -> None:
        while self._waiting and not self._is_trainable(self._waiting[0], version):
            item = self._finish()
            if item.reason is not None:
                self._dropped[item.reason] += 1
            elif item.sample is not None:
                self._dropped["stale"] += 1
                self._stale_in_queue += _lag(item.sample, version).in_flight <= self._max_lag

    def _trainable(self, version: int) -> int:
        return sum(self._is_trainable(item, version) for item in self._waiting)

    def _is_trainable(self, item: _Waiting, version: int) -> bool:
        if item.sample is None or item.reason is not None:
            return False
        return not is_stale(_lag(item.sample, version), self._max_lag)


def _lag(sample: Sample, version: int) -> Lag:
    return lag_of(current_version=version, version_min=sample.version_min, version_max=sample.version_max)
