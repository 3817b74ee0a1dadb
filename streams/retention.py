"""Which weight blobs may be deleted: the decision alone, without store or broker.

Kept is everything from the second newest whole anchor on (or from an older one, by choice), and before that:

- what a live engine needs: the deltas behind the version that it serves, and the anchors that it may be loading;
- what leads to a version that somebody asked to keep: its anchor and the deltas up to it;
- every list of samples: redoing a step and the audit read them;
- every blob of a name that this log does not know, which may be another run's.

A trainer that restarts takes the weights from the newest anchor and the deltas behind it: they are always kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..schemas.engine import EngineState, EngineStatus
from ..schemas.weights import BlobKind, WeightBlob, WeightRecord

LEAST_ANCHORS = 2
"""The newest anchor may turn out to be broken."""
_VERSION = re.compile(r"v(\d+)-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Why older blobs stay."""

    why: str
    blobs: int
    bytes: int
    """Of what would otherwise be deleted; another hold may be on the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a clean-up does."""

    floor: int | None
    """The version of the oldest anchor that is kept for its own sake; None: there are not enough, all is kept."""
    delete: tuple[tuple[int, WeightBlob], ...] = ()
    """(version, blob) in ascending order of versions: each is in the store."""
    holds: tuple[Hold, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes of what no record names, up to the newest version: a dead trainer's, or another run's."""

    @property
    def bytes(self) -> int:
        """That are freed."""
        return sum(blob.size for _, blob in self.delete)


def plan_cleanup(
    records: Iterable[WeightRecord],
    present: Mapping[str, int],
    engines: Iterable[tuple[EngineStatus, float]],
    *,
    keep_anchors: int = LEAST_ANCHORS,
    keep_versions: Iterable[int] = (),
    engine_age_s: float = 3600.0,
) -> Plan:
    """What may go, of the versions of one policy.

    `present`: name -> bytes of the blobs in the store. `engines`: each one's newest status and its age in seconds;
    those of another policy, stopped ones and those that have been silent for `engine_age_s` hold nothing.
    ValueError: fewer than LEAST_ANCHORS.
    """
    if keep_anchors < LEAST_ANCHORS:
        raise ValueError(f"keep_anchors is {keep_anchors}: use {LEAST_ANCHORS} or more")
    known = {r.version: r for r in sorted(records, key=lambda r: r.version)}
    unknown = _unknown(known, present)
    whole = [v for v, r in known.items() if _is_whole(r, present)]
    if len(whole) < keep_anchors:
        return Plan(floor=None, unknown=unknown)
    floor = whole[-keep_anchors]
    older = [(v, b) for v, r in known.items() if v < floor for b in r.blobs if _removable(b, present)]
    needed = {b.uri for v, r in known.items() if v >= floor for b in r.blobs}
    older = [(v, b) for v, b in older if b.uri not in needed]
    claims = [*_of_engines(engines, known, whole, engine_age_s), *_of_versions(keep_versions, whole)]
    holds: list[Hold] = []
    held: set[str] = set()
    for claim in claims:
        blobs = [b for v, b in older if claim.takes(v, b.kind)]
        held.update(b.uri for b in blobs)
        if blobs:
            holds.append(Hold(why=claim.why, blobs=len(blobs), bytes=sum(b.size for b in blobs)))
    delete = tuple((v, b) for v, b in older if b.uri not in held)
    return Plan(floor=floor, delete=delete, holds=tuple(holds), unknown=unknown)


@dataclass(frozen=True, slots=True)
class _Claim:
    """On anchors from `anchors` and deltas behind `deltas`, both up to `last`."""

    why: str
    anchors: int
    deltas: int
    last: int | None = None

    def takes(self, version: int, kind: BlobKind) -> bool:
        if self.last is not None and version > self.last:
            return False
        return version >= self.anchors if kind is BlobKind.ANCHOR else version > self.deltas


def _of_engines(
    engines: Iterable[tuple[EngineStatus, float]],
    known: Mapping[int, WeightRecord],
    whole: Sequence[int],
    age_limit_s: float,
) -> Iterator[_Claim]:
    policies = {r.policy_id for r in known.values()}
    for status, age_s in engines:
        live = status.state is not EngineState.STOPPED and age_s <= age_limit_s
        if not live or status.policy_id not in policies:
            continue
        # It loads the newest anchor that it knows of, or the one before where that is broken.
        seen = [v for v in whole if v <= status.latest_version][-LEAST_ANCHORS:]
        serves = status.version if status.state is not EngineState.POISONED else -1
        if not seen and serves < 0:
            continue
        first = seen[0] if seen else serves + 1
        why = f"engine {status.engine_id} ({status.state.value}, seen {age_s:.0f} s ago) is at version {status.version}"
        yield _Claim(why, anchors=first, deltas=min(first, serves) if serves >= 0 else first)


def _of_versions(versions: Iterable[int], whole: Sequence[int]) -> Iterator[_Claim]:
    for version in sorted(set(versions)):
        start = max((v for v in whole if v <= version), default=None)
        if start is not None:
            yield _Claim(f"version {version} is to be kept", anchors=start, deltas=start, last=version)


def _is_whole(record: WeightRecord, present: Mapping[str, int]) -> bool:
    """Whether every shard of the version's anchor is in the store."""
    shards = record.blobs_of(BlobKind.ANCHOR)
    return bool(shards) and all(present.get(b.uri) == b.size for b in shards)


def _removable(blob: WeightBlob, present: Mapping[str, int]) -> bool:
    return blob.kind is not BlobKind.SAMPLES and blob.uri in present


def _unknown(known: Mapping[int, WeightRecord], present: Mapping[str, int]) -> dict[str, int]:
    """A version above the newest may be on its way into the log."""
    named = {b.uri for r in known.values() for b in r.blobs}
    newest = max(known, default=-1)
    found = {}
    for name, size in present.items():
        match = _VERSION.match(name.rpartition("/")[2])
        if name not in named and (match is None or int(match[1]) <= newest):
            found[name] = size
    return found
