"""Which weights to load next: the decision alone, without engine, store or broker.

Deltas in order, several at once where several wait. After a gap, a wrong base, a broken blob or torn weights:
the newest usable anchor and the chain from there. A blob that does not decode is never tried again; one that
cannot be fetched is, a few times.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ...schemas.weights import BlobKind, WeightRecord

logger = logging.getLogger(__name__)

_AFTER_ALL_BACKOFFS = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRule:
    """Limits."""

    max_chain: int = 32
    """Versions staged for one pause."""
    attempts: int = 4
    """Of fetching one blob, before it counts as lost."""
    first_backoff: float = 0.25
    """Seconds; doubled after each failure."""


@dataclass(frozen=True, slots=True)
class Route:
    """What to load, in this order."""

    records: tuple[WeightRecord, ...]
    from_anchor: bool
    """The first record is loaded from its anchor, whatever is live; all others from their deltas."""

    def kind(self, index: int) -> BlobKind:
        """Which blob of record `index` is meant."""
        return BlobKind.ANCHOR if self.from_anchor and index == 0 else BlobKind.DELTA


@dataclass(slots=True)
class _Fault:
    count: int
    until: float
    """Not tried before this time; infinity: never again."""


class Follower:
    """What is live, what the topic offers, and what to do about the difference."""

    def __init__(self, rule: FollowRule = FollowRule()) -> None:
        self.rule = rule
        self.version = -1
        """Live; -1 before the first."""
        self.weights_hash: int | None = None
        self.latest = -1
        """Newest version seen."""
        self._reload = True
        self._records: dict[int, WeightRecord] = {}
        self._faults: dict[tuple[int, BlobKind], _Fault] = {}

    def see(self, record: WeightRecord) -> None:
        """A record of the weights topic; one that is known already changes nothing."""
        known = self._records.get(record.version)
        if known is not None and known.weights_hash != record.weights_hash:
            logger.error("two different records of one version; the first counts version=%d", record.version)
        if known is not None:
            return
        # The samples of thousands of versions would fill the memory and are of no use here.
        self._records[record.version] = replace(record, samples=(), consumed=())
        self.latest = max(self.latest, record.version)
        self._forget()

    def next(self, now: float) -> Route | None:
        """What to load now; None: nothing, or nothing yet."""
        if not self._reload and self.weights_hash is not None:
            chain = self._chain(self.version, self.weights_hash, now)
            if chain:
                return Route(tuple(chain), from_anchor=False)
        for anchor in self._anchors():
            if not self._usable(anchor.version, BlobKind.ANCHOR, now):
                continue
            route = [anchor, *self._chain(anchor.version, anchor.weights_hash, now)]
            if self._reload or route[-1].version > self.version:
                return Route(tuple(route), from_anchor=True)
            return None  # an older anchor leads no further
        return None

    def live(self, record: WeightRecord) -> None:
        """`record`'s weights are live now."""
        self.version, self.weights_hash, self._reload = record.version, record.weights_hash, False
        self._faults = {k: f for k, f in self._faults.items() if k[0] > record.version}
        self._forget()

    def failed(self, version: int, kind: BlobKind, now: float, *, final: bool) -> None:
        """A blob could not be used; `final`: and never will."""
        fault = self._faults.setdefault((version, kind), _Fault(0, now))
        fault.count += 1
        lost = final or fault.count >= self.rule.attempts
        fault.until = float("inf") if lost else now + self.rule.first_backoff * 2 ** (fault.count - 1)

    def torn(self) -> None:
        """What is live is unknown or mixed: only an anchor helps."""
        self._reload = True

    @property
    def needs_anchor(self) -> bool:
        """True when nothing is live, or not for sure."""
        return self._reload

    def stuck(self) -> str | None:
        """Why no newer version can be reached with what has been seen; None where one is live or can be."""
        reached = self.version >= self.latest and not self._reload
        if self.latest < 0 or reached or self.next(_AFTER_ALL_BACKOFFS) is not None:
            return None
        return f"no way on from version {self.version}: waiting for an anchor"

    def _chain(self, version: int, weights_hash: int, now: float) -> list[WeightRecord]:
        """The deltas that lead on from `version` without a gap."""
        chain: list[WeightRecord] = []
        while len(chain) < self.rule.max_chain:
            record = self._records.get(version + 1)
            if record is None or not record.has_delta or record.base_hash != weights_hash:
                break
            if not self._usable(record.version, BlobKind.DELTA, now):
                break
            chain.append(record)
            version, weights_hash = record.version, record.weights_hash
        return chain

    def _usable(self, version: int, kind: BlobKind, now: float) -> bool:
        fault = self._faults.get((version, kind))
        return fault is None or fault.until <= now

    def _anchors(self) -> list[WeightRecord]:
        """Newest first."""
        return [r for _, r in sorted(self._records.items(), reverse=True) if r.has_anchor]

    def _forget(self) -> None:
        """Keep what lies behind the second newest anchor only: the newest may turn out to be broken."""
        anchors = self._anchors()
        if len(anchors) > 2:
            oldest = anchors[1].version
            self._records = {v: r for v, r in self._records.items() if v >= oldest}
