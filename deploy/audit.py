"""The books of a run: where each trajectory of the log ended, and whether what the log says adds up. Pure counting.

Fed in this order, so that a run that goes on may be audited too: committed offsets, weights, dead letters,
trajectories, scores, samples. About 300 bytes a trajectory: ids and places, no payloads.

A trajectory ends in the first of these that is true: trained; its first sample record dropped it (void among the
reasons); admitted and passed over by the trainer; dead-lettered; still before a stage that has not come to it;
lost. Repeats of a score or a sample are normal: the processors are at-least-once, and the first sample record of
a trajectory counts, as it does in the trainer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..schemas.weights import WeightRecord

Place = tuple[int, int]
"""(partition, offset)."""
EXAMPLES = 5
"""Names that a fault is shown with."""
TRAINER_DROPS = "in_trainer"
"""Reason of what was admitted and then passed over by the trainer, which counts by reason: stale, payload."""


@dataclass(slots=True)
class _Entry:
    """One trajectory."""

    place: Place | None = None
    """Its newest record; None: only the ledger knows it."""
    score: Place | None = None
    """Its newest score."""
    sample: Place | None = None
    """Its first sample record, which decides."""
    reason: str | None = None
    """Of a first sample record that dropped it; None: it was admitted."""
    trained: int = 0
    conflict: bool = False
    dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """What the books say."""

    acknowledged: int
    """Trajectories in the log, and those that a producer was told are in it."""
    trained: int = 0
    dropped: int = 0
    void: int = 0
    deadlettered: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Stage -> trajectories that it has not come to."""
    lost: int = 0
    trained_twice: int = 0
    """Trajectories that more than one step, or one step twice, was made of."""
    versions: int = 0
    """The newest version: versions 0 to n are in the log."""
    version_gaps: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Of the dropped and void ones."""
    conflicts: int = 0
    """Trajectories whose repeated sample records disagree about their fate; the first one counts."""
    ledger: int | None = None
    """Acknowledgements that producers wrote down; None: there is no ledger."""
    problems: tuple[str, ...] = ()
    """What does not add up, each with examples."""
    notes: tuple[str, ...] = ()

    @property
    def adds_up(self) -> bool:
        """True when nothing is wrong; what waits is no fault."""
        return not self.problems

    @property
    def in_flight(self) -> int:
        """Trajectories that some stage has not come to."""
        return sum(self.waiting.values())


class Audit:
    """Counts; see the module for the order of the calls."""

    def __init__(
        self, committed: Mapping[str, Mapping[int, int]], *, expired: Mapping[str, int] | None = None
    ) -> None:
        """`committed`: `trajectories` and `scores` -> partition -> next offset of the processors' group.

        `expired`: topic -> records that retention has removed: what they were cannot be told.
        """
        self._committed = committed
        self._expired = {t: n for t, n in (expired or {}).items() if n}
        self._entries: dict[str, _Entry] = {}
        self._trained_at: Counter[Place] = Counter()
        self._consumed: dict[int, int] = {}
        self._trainer_drops: Counter[str] = Counter()
        self._consumed_records = self._trained_records = 0
        self._last: WeightRecord | None = None
        self._gaps = 0
        self._chain: list[str] = []
        self._letters: dict[str, set[Place]] = {}
        self._strays: list[str] = []
        self._ledger: set[str] | None = None

    def weights(self, record: WeightRecord, samples: Iterable[Place]) -> None:
        """The next version of the log, and the sample records that made it."""
        last = self._last
        expected = 0 if last is None else last.version + 1
        if record.version > expected and not (last is None and self._expired.get("weights")):
            self._gaps += record.version - expected
            self._chain.append(f"version {expected} is missing before {record.version}")
        elif record.version < expected:
            self._chain.append(f"version {record.version} comes after version {expected - 1}")
        elif last is not None and record.has_delta and record.base_hash != last.weights_hash:
            self._chain.append(f"version {record.version} was not made from the weights of {last.version}")
        self._last = record
        self._trained_at.update(samples)
        self._consumed.update(record.consumed)
        self._trainer_drops.update(record.dropped)

    def dead_letter(self, topic: str, partition: int, offset: int) -> None:
        """A letter about a record of `topic` (short name). Markers are no letters."""
        self._letters.setdefault(topic, set()).add((partition, offset))

    def acknowledged(self, ids: Iterable[str]) -> None:
        """What producers were told is in the log."""
        self._ledger = self._ledger or set()
        for name in ids:
            self._ledger.add(name)
            self._entry(name)

    def trajectory(self, partition: int, offset: int, trajectory_id: str | None) -> None:
        """A record of `trajectories`; None where it cannot be read."""
        entry = self._entry(trajectory_id or f"trajectories-{partition}@{offset}")
        entry.place = (partition, offset)
        entry.dead |= (partition, offset) in self._letters.get("trajectories", ())

    def score(self, partition: int, offset: int, trajectory_id: str | None) -> None:
        """A record of `scores`."""
        entry = self._known("scores", partition, offset, trajectory_id)
        if entry is not None:
            entry.score = (partition, offset)
            entry.dead |= (partition, offset) in self._letters.get("scores", ())

    def sample(self, partition: int, offset: int, trajectory_id: str | None, reason: str | None) -> None:
        """A record of `samples`; `reason` of a dropped one, None of an admitted one."""
        place = (partition, offset)
        trained = self._trained_at.pop(place, 0)
        self._trained_records += trained
        dead = place in self._letters.get("samples", ())
        self._consumed_records += offset < self._consumed.get(partition, 0) and not dead
        entry = self._known("samples", partition, offset, trajectory_id)
        if entry is None:
            if trained and not self._expired.get("trajectories"):
                self._strays.append(f"{trajectory_id or place} was trained and is in no trajectory")
            return
        entry.trained += trained
        entry.dead |= dead
        if entry.sample is None:
            entry.sample, entry.reason = place, reason
        else:
            entry.conflict |= (entry.reason is None) != (reason is None)

    def result(self) -> AuditResult:
        """The sums."""
        ends: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        lost: list[str] = []
        for name, entry in self._entries.items():
            end, detail = self._end(entry)
            ends[end] += 1
            if end in ("dropped", "void"):
                reasons[detail] += 1
            elif end == "waiting":
                waiting[detail] += 1
            elif end == "lost":
                lost.append(f"{name} {detail}")
        twice = [n for n, e in self._entries.items() if e.trained > 1]
        return AuditResult(
            acknowledged=len(self._entries),
            trained=ends["trained"],
            dropped=ends["dropped"],
            void=ends["void"],
            deadlettered=ends["deadlettered"],
            waiting=dict(waiting),
            lost=len(lost),
            trained_twice=len(twice),
            versions=self._last.version if self._last is not None else 0,
            version_gaps=self._gaps,
            reasons=dict(reasons),
            conflicts=sum(e.conflict for e in self._entries.values()),
            ledger=len(self._ledger) if self._ledger is not None else None,
            problems=tuple(self._problems(lost, twice)),
            notes=tuple(f"retention has removed {n} records of {t}" for t, n in self._expired.items()),
        )

    def _end(self, entry: _Entry) -> tuple[str, str]:
        """(end, reason or stage)."""
        if entry.trained:
            return "trained", ""
        if entry.sample is not None and entry.reason is not None:
            return ("void" if entry.reason == "void" else "dropped"), entry.reason
        if entry.dead:
            return "deadlettered", ""
        if entry.sample is not None:
            passed = entry.sample[1] < self._consumed.get(entry.sample[0], 0)
            return ("dropped", TRAINER_DROPS) if passed else ("waiting", "trainer")
        if entry.score is not None:
            return self._not_come_to("scores", entry.score, "advantage", "samples")
        if entry.place is not None:
            return self._not_come_to("trajectories", entry.place, "verify", "scores")
        return self._gone("trajectories", "was acknowledged and is not in the log")

    def _not_come_to(self, topic: str, place: Place, stage: str, output: str) -> tuple[str, str]:
        if place[1] >= self._committed.get(topic, {}).get(place[0], 0):
            return "waiting", stage
        return self._gone(
            output, f"is committed at {topic}-{place[0]} offset {place[1]} and nothing came of it"
        )

    def _gone(self, topic: str, how: str) -> tuple[str, str]:
        """Lost, unless retention may have removed what would tell."""
        return ("dropped", "expired") if self._expired.get(topic) else ("lost", how)

    def _problems(self, lost: list[str], twice: list[str]) -> Iterable[str]:
        if lost:
            yield f"{len(lost)} lost: {_some(lost)}"
        if twice:
            yield f"{len(twice)} trained more than once: {_some(twice)}"
        against = [n for n, e in self._entries.items() if e.trained and e.reason is not None]
        if against:
            yield f"{len(against)} trained although their first sample record dropped them: {_some(against)}"
        early = [n for n, e in self._entries.items() if e.trained and e.place is None]
        if early and not self._expired.get("trajectories"):
            yield f"{len(early)} trained that are not in trajectories: {_some(early)}"
        if self._strays:
            yield f"{len(self._strays)} of unknown trajectories: {_some(self._strays)}"
        if self._chain:
            yield f"the versions are no chain: {_some(self._chain)}"
        if self._expired.get("samples"):
            return
        if self._trained_at:
            yield f"{len(self._trained_at)} trained sample records are not in the log: {_some(self._trained_at)}"
        uncounted = self._consumed_records - self._trained_records - self._trainer_drops.total()
        if uncounted:
            yield (
                f"the trainer finished with {self._consumed_records} sample records, trained {self._trained_records} "
                f"and counted {self._trainer_drops.total()} as dropped: {uncounted} differ"
            )

    def _entry(self, name: str) -> _Entry:
        return self._entries.setdefault(name, _Entry())

    def _known(self, topic: str, partition: int, offset: int, trajectory_id: str | None) -> _Entry | None:
        """The entry of a record's trajectory; None where nothing is known about it."""
        if trajectory_id is not None:
            # What came into the log while it was read has scores before this audit has seen its trajectory.
            return self._entries.get(trajectory_id)
        if (partition, offset) not in self._letters.get(topic, ()):
            self._strays.append(f"{topic}-{partition} offset {offset} cannot be read and is no dead letter")
        return None


def _some(names: Iterable[object]) -> str:
    found = [str(n) for n in names]
    more = f" and {len(found) - EXAMPLES} more" if len(found) > EXAMPLES else ""
    return ", ".join(found[:EXAMPLES]) + more
