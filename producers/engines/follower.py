"""Which weights to load next: the decision alone, without engine, store or broker.

Two ways lead on: the deltas behind what is live, composed into one update, or an anchor and the deltas behind
it. The one that gets further counts, then the one with fewer bytes to fetch. A blob that does not decode is never
tried again; one that is not there is, a few times and then rarely; a store that is away is asked for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ...schemas.weights import BlobKind, WeightBlob, WeightRecord

logger = logging.getLogger(__name__)

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowRule:
    """Limits."""

    max_chain: int = 32
    """Versions staged for one pause."""
    attempts: int = 4
    """Of one blob, before other ways are looked for, or it counts as lost."""
    first_backoff: float = 0.25
    """Seconds; doubled after each failure."""
    last_backoff: float = 5.0
    """Seconds between attempts while a store is away."""
    lost_backoff: float = 60.0
    """Seconds between attempts of a blob that counts as lost: somebody may have put it back."""


class Trouble(Enum):
    """Why a blob could not be used."""

    AWAY = "away"
    """The store, or the engine, failed; the blob itself may be good."""
    GONE = "gone"
    """There is no such blob, or its bytes are not those of the record."""
    BAD = "bad"
    """Its contents do not fit: they never will."""


@dataclass(frozen=True, slots=True)
class Route:
    """What to load, in this order."""

    records: tuple[WeightRecord, ...]
    from_anchor: bool
    """The first record is loaded from its anchor, whatever is live; all others from their deltas."""

    def kind(self, index: int) -> BlobKind:
        """Which blob of record `index` is meant."""
        return BlobKind.ANCHOR if self.from_anchor and index == 0 else BlobKind.DELTA

    def blobs(self, index: int) -> tuple[WeightBlob, ...]:
        """The shards to fetch for record `index`; none where it changes no bit."""
        record, kind = self.records[index], self.kind(index)
        return () if kind is BlobKind.DELTA and _changes_nothing(record) else record.blobs_of(kind)

    @property
    def bytes_to_fetch(self) -> int:
        """Size of all its blobs."""
        return sum(b.size for i in range(len(self.records)) for b in self.blobs(i))


@dataclass(slots=True)
class _Fault:
    count: int = 0
    until: float = 0.0
    """Not tried before this time."""
    lost: bool = False
    brief: bool = False
    """Better waited for than gone around."""


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
        self._hashes: dict[int, int] = {}
        """Of every version ever seen: a topic may be read twice, and may be written twice."""
        self._faults: dict[tuple[int, BlobKind], _Fault] = {}
        self._jumps: dict[int, WeightRecord] = {}
        """Version -> a much later one with one delta between them."""
        self._forgot = False

    def see(self, record: WeightRecord) -> str | None:
        """A record of the weights topic, in any order; one that is known already changes nothing.

        Returns what is wrong with it where another of its version came before: the first one counts.
        """
        known = self._hashes.setdefault(record.version, record.weights_hash)
        if known != record.weights_hash:
            return self._conflict(record, known)
        if record.version not in self._records:
            # The samples of thousands of versions would fill the memory and are of no use here.
            self._records[record.version] = replace(record, samples=(), consumed=())
            self.latest = max(self.latest, record.version)
            self._forget()
        return None

    @property
    def records(self) -> Mapping[int, WeightRecord]:
        """Version -> record, of those that may still be needed."""
        return self._records

    def offer(self, jumps: Iterable[WeightRecord]) -> None:
        """Compacted deltas (streams/compacts.py): ways that are shorter, and never needed."""
        for jump in jumps:
            if jump.base_version is not None and self._hashes.get(jump.version) == jump.weights_hash:
                known = self._jumps.get(jump.base_version)
                if known is None or known.version < jump.version:
                    self._jumps[jump.base_version] = jump

    def next(self, now: float) -> Route | None:
        """What to load now; None: nothing, or nothing yet."""
        route = self._best(now)
        if route is None:
            return None
        ready = []
        for i, record in enumerate(route.records[: self.rule.max_chain]):
            if route.blobs(i) and not self._ready(record.version, route.kind(i), now):
                break
            ready.append(record)
        return replace(route, records=tuple(ready)) if ready else None

    def live(self, record: WeightRecord) -> None:
        """`record`'s weights are live now."""
        self.version, self.weights_hash, self._reload = record.version, record.weights_hash, False
        self._faults = {k: f for k, f in self._faults.items() if k[0] > record.version}
        self._forget()

    def failed(self, version: int, kind: BlobKind, now: float, trouble: Trouble) -> None:
        """A blob could not be used."""
        rule = self.rule
        if kind is BlobKind.DELTA and self._forget_jumps(version):
            return
        fault = self._faults.setdefault((version, kind), _Fault())
        fault.count += 1
        fault.brief = trouble is Trouble.AWAY and fault.count < rule.attempts
        fault.lost = trouble is Trouble.BAD or (trouble is Trouble.GONE and fault.count >= rule.attempts)
        backoff = min(rule.first_backoff * 2.0 ** min(fault.count - 1, 30), rule.last_backoff)
        if trouble is Trouble.BAD:
            fault.until = NEVER
        else:
            fault.until = now + (rule.lost_backoff if fault.lost else backoff)

    def torn(self) -> None:
        """What is live is unknown or mixed: only an anchor helps."""
        self._reload = True

    @property
    def needs_anchor(self) -> bool:
        """True when nothing is live, or not for sure."""
        return self._reload

    @property
    def missing(self) -> int | None:
        """A version that no record has been seen of, and without which there is no way on."""
        gap = None if self._reload else self.version + 1
        while gap is not None and gap in self._records:
            gap += 1
        return None if gap is None or gap >= self.latest or self._best(None) is not None else gap

    def look_back(self) -> str | None:
        """Why the topic should be read again from its beginning; None where that cannot help."""
        if (gap := self.missing) is not None:
            return f"version {gap} is missing"
        if self._forgot and self.stuck() is not None:
            return "no anchor that is remembered can be used, an older one may be"
        return None

    def looked_back(self) -> None:
        """The topic is being read again; what it brings is kept as long as there is no better."""
        self._forgot = False

    def stuck(self) -> str | None:
        """Why no newer version can be reached with what has been seen; None where one is live or can be."""
        reached = self.version >= self.latest and not self._reload
        if self.latest < 0 or reached or self._best(None) is not None:
            return None
        return f"no way on from version {self.version}: {self._why()}; waiting for an anchor"

    def _why(self) -> str:
        if self._reload:
            anchors = [str(r.version) for r in self._anchors()]
            return (
                f"the anchors {', '.join(anchors)} cannot be used" if anchors else "no anchor has been seen"
            )
        following = self._records.get(self.version + 1)
        if following is None:
            return f"version {self.version + 1} is not on the topic, {self.latest} is"
        if not following.has_delta:
            return f"version {following.version} has no delta"
        if following.base_hash != self.weights_hash:
            return f"version {following.version} goes on top of other weights than are live here"
        return f"the delta of version {following.version} cannot be used"

    def _best(self, now: float | None) -> Route | None:
        """The way that gets furthest, then the cheapest; `now` None: as if every blob were there but the lost."""
        routes = [
            Route((anchor, *self._chain(anchor.version, anchor.weights_hash, now)), from_anchor=True)
            for anchor in self._anchors()
            if self._open(anchor.version, BlobKind.ANCHOR, now)
        ]
        if not self._reload and self.weights_hash is not None:
            chain = self._chain(self.version, self.weights_hash, now)
            routes = [r for r in routes if r.records[-1].version > self.version]
            routes[:0] = [Route(tuple(chain), from_anchor=False)] if chain else []
        return max(routes, key=lambda r: (r.records[-1].version, -r.bytes_to_fetch), default=None)

    def _chain(self, version: int, weights_hash: int, now: float | None) -> list[WeightRecord]:
        """The deltas that lead on from `version` without a gap."""
        chain: list[WeightRecord] = []
        while (record := self._jumps.get(version) or self._records.get(version + 1)) is not None:
            if not record.has_delta or record.base_hash != weights_hash:
                break
            if not _changes_nothing(record) and not self._open(record.version, BlobKind.DELTA, now):
                break
            chain.append(record)
            version, weights_hash = record.version, record.weights_hash
        return chain

    def _forget_jumps(self, version: int) -> bool:
        """Forget the compacted deltas to `version`; False if there were none."""
        kept = {base: jump for base, jump in self._jumps.items() if jump.version != version}
        found = len(kept) < len(self._jumps)
        self._jumps = kept
        return found

    def _open(self, version: int, kind: BlobKind, now: float | None) -> bool:
        """Whether a route may lead over this blob: it is ready, or will be in a moment."""
        fault = self._faults.get((version, kind))
        if fault is None:
            return True
        if now is None:
            return not fault.lost
        # Torn weights serve nobody: whatever is there at once is better than what may come.
        return fault.until <= now or (fault.brief and not self._reload)

    def _ready(self, version: int, kind: BlobKind, now: float) -> bool:
        fault = self._faults.get((version, kind))
        return fault is None or fault.until <= now

    def _anchors(self) -> list[WeightRecord]:
        """Newest first."""
        return [r for _, r in sorted(self._records.items(), reverse=True) if r.has_anchor]

    def _forget(self) -> None:
        """Needed are what leads on from the live version and, since the newest anchor may be broken, the one before."""
        anchors = [r.version for r in self._anchors() if self._open(r.version, BlobKind.ANCHOR, None)]
        if len(anchors) < 2:
            return
        oldest = anchors[1] if self._reload else min(anchors[1], self.version + 1)
        kept = {v: r for v, r in self._records.items() if v >= oldest}
        self._forgot = self._forgot or len(kept) < len(self._records)
        self._records = kept

    def _conflict(self, record: WeightRecord, known: int) -> str:
        if record.version == 0:
            return (
                f"the weights topic begins anew: version 0 has weights {record.weights_hash:016x}, here it had"
                f" {known:016x}; restart the engine to follow the new versions from their beginning"
            )
        return (
            f"two records of version {record.version}: weights {known:016x}, which counts, and"
            f" {record.weights_hash:016x}; two trainers write to this topic, or it was written anew"
        )


def _changes_nothing(record: WeightRecord) -> bool:
    return record.base_hash == record.weights_hash
