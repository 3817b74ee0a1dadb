"""How many rollouts may start, so that none is sampled only to be dropped as stale: a ledger of what is ahead.

A rollout of this worker goes `running` -> `unresolved` (its trajectory is acknowledged) -> its fate is on the
`samples` topic (or its trajectory is a dead letter). Admitted samples, of whichever worker, stay `ahead` until
the trainer's weight record says that it has consumed their offset. Everything is told from outside, in any
order and more than once; nothing here reads a clock or a topic.

Ahead of the trainer is then at most (max_lag + 1) * batch_size, but for one case: less than a batch is ahead,
and the group is larger than what is left. It must start all the same, or the trainer would wait for ever.
Several workers share it: each takes an equal part of what is not ahead, and stays below what the others have told
of theirs (peers.py). What they tell is a moment old, so n of them may overshoot together by a group each but one,
and while they do not know of each other yet (or one was taken for dead) by its unfinished work; the gate and the
trainer then drop what is too old.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from ...streams.staleness import admission_capacity

REMEMBERED_SAMPLES = 50_000
"""Sample ids kept to tell repeats (the processors are at-least-once)."""


class Ledger:
    """What this worker has under way and what waits for the trainer."""

    def __init__(self, *, max_lag: int, batch_size: int, grace_ms: int) -> None:
        """`grace_ms`: after its group's deadline a rollout without a fate is forgotten."""
        self.version = 0
        self.forgotten = 0
        """Rollouts given up on: nobody told their fate."""
        self._max_lag = max_lag
        self._batch_size = batch_size
        self._grace_ms = grace_ms
        self._running: set[str] = set()
        self._unresolved: OrderedDict[str, int] = OrderedDict()
        """rollout id -> when it is forgotten; about in the order of time."""
        self._fated_early: set[str] = set()
        """Fates that came before the acknowledgement did."""
        self._ahead: dict[int, deque[int]] = {}
        """Partition of `samples` -> ascending offsets of admitted samples not yet consumed."""
        self._consumed: dict[int, int] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()

    @property
    def running(self) -> int:
        """Own rollouts in flight."""
        return len(self._running)

    @property
    def unresolved(self) -> int:
        """Own rollouts acknowledged, without a fate."""
        return len(self._unresolved)

    @property
    def ahead(self) -> int:
        """Admitted samples that the trainer has not consumed."""
        return sum(map(len, self._ahead.values()))

    @property
    def outstanding(self) -> int:
        """Own rollouts whose fate is not known."""
        return self.running + self.unresolved

    @property
    def capacity(self) -> int:
        """Rollouts that may start now, were this the only worker."""
        return admission_capacity(
            max_lag=self._max_lag,
            version=self.version,
            batch_size=self._batch_size,
            accepted=self.version * self._batch_size + self.ahead + self.unresolved,
            running=self.running,
        )

    def may_start(self, size: int, others: Sequence[int] = ()) -> bool:
        """True when a whole group of `size` rollouts may start; `others`: what each other worker has outstanding."""
        elsewhere, workers = sum(others), len(others) + 1
        if self.capacity - elsewhere < size:
            missing = self._batch_size - self.ahead
            return self.outstanding + elsewhere < missing and self.outstanding * workers < missing
        share = (self.capacity + self.outstanding) // workers
        return self.outstanding + size <= max(share, size)

    def start(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts are running."""
        self._running.update(rollout_ids)

    def produced(self, rollout_id: str, deadline_ms: int) -> None:
        """Its trajectory is acknowledged; its group closes by `deadline_ms`."""
        self._running.discard(rollout_id)
        if rollout_id in self._fated_early:
            self._fated_early.discard(rollout_id)
        else:
            self._unresolved[rollout_id] = deadline_ms + self._grace_ms

    def resolved(self, rollout_id: str) -> None:
        """Its fate is known, or its trajectory is a dead letter."""
        if self._unresolved.pop(rollout_id, None) is None and rollout_id in self._running:
            self._fated_early.add(rollout_id)

    def sample(self, partition: int, offset: int, sample_id: str, rollout_id: str, *, admitted: bool) -> None:
        """One record of `samples`, of whichever worker."""
        self.resolved(rollout_id)
        if not admitted or self._is_repeat(sample_id) or offset < self._consumed.get(partition, 0):
            return
        offsets = self._ahead.setdefault(partition, deque())
        if not offsets or offset > offsets[-1]:
            offsets.append(offset)

    def trained(self, version: int, consumed: Iterable[tuple[int, int]]) -> None:
        """A weight record: `version` exists, samples below each (partition, next offset) are finished with."""
        self.version = max(self.version, version)
        for partition, next_offset in consumed:
            if next_offset <= self._consumed.get(partition, 0):
                continue
            self._consumed[partition] = next_offset
            offsets = self._ahead.get(partition, deque())
            while offsets and offsets[0] < next_offset:
                offsets.popleft()

    def forget(self, now_ms: int) -> list[str]:
        """Give up on what has been without a fate for too long; the rollout ids."""
        late = [r for r, until in self._unresolved.items() if until < now_ms]
        for rollout_id in late:
            del self._unresolved[rollout_id]
        self.forgotten += len(late)
        return late

    def _is_repeat(self, sample_id: str) -> bool:
        if sample_id in self._seen:
            return True
        self._seen[sample_id] = None
        if len(self._seen) > REMEMBERED_SAMPLES:
            self._seen.popitem(last=False)
        return False
