"""The groups of one partition of `scores`: who is in, when a group closes, what comes too late.

A pure state machine; time is the broker's append time of the record in hand, so that a restart and a replay
close each group alike:

    OPEN --the last rollout is in--------------------------> CLOSED (complete)
    OPEN --a record appended after the group's deadline----> CLOSED (deadline)
    OPEN --the clock, once the partition is read to its end-> CLOSED (deadline)

A closed group never reopens. What was appended after its group's deadline, or after its group closed, is late;
what is in already is a duplicate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import xxhash

from ..schemas.score import Score, ScoreStatus

H = TypeVar("H")

CLOCK_GRACE_MS = 1000
"""How long past its deadline a group waits when only the clock speaks."""
REMEMBER_MS = 60_000
"""How long past its deadline a closed group is remembered, to tell repeats from late members."""


class Cause(StrEnum):
    """What closed a group."""

    COMPLETE = "complete"
    DEADLINE = "deadline"


class Verdict(StrEnum):
    """What a score record is to its group."""

    MEMBER = "member"
    AGAIN = "again"
    """This very record was read before; its handle has been replaced."""
    DUPLICATE = "duplicate"
    """Another record of the same trajectory is in."""
    LATE = "late"


@dataclass(slots=True)
class Entry(Generic[H]):
    """One record of an open group."""

    score: Score
    offset: int
    handle: H


@dataclass(frozen=True, slots=True)
class Rollout(Generic[H]):
    """One rollout of a closed group with those of its trajectories that came in time, by index."""

    rollout_id: str
    entries: tuple[Entry[H], ...]
    whole: bool
    """All its trajectories are in."""

    @property
    def reward(self) -> float | None:
        """What its trajectories share: the reward of the last one; None when one is missing or void."""
        if not self.whole or any(e.score.status is ScoreStatus.VOID for e in self.entries):
            return None
        return self.entries[-1].score.reward


@dataclass(frozen=True, slots=True)
class ClosedGroup(Generic[H]):
    """A group that will not change any more."""

    group_id: str
    cause: Cause
    rollouts: tuple[Rollout[H], ...]
    """In the order of their first records."""

    @property
    def entries(self) -> list[Entry[H]]:
        """All records of the group."""
        return [e for r in self.rollouts for e in r.entries]


@dataclass(slots=True)
class _Open(Generic[H]):
    size: int
    deadline_ms: int
    rollouts: dict[str, dict[str, Entry[H]]] = field(default_factory=dict)
    """rollout_id -> trajectory_id -> record."""

    def find(self, score: Score) -> Entry[H] | None:
        return self.rollouts.get(score.rollout_id, {}).get(score.trajectory_id)

    def is_complete(self) -> bool:
        return len(self.rollouts) >= self.size and all(map(_whole, self.rollouts.values()))


@dataclass(slots=True)
class _Closed:
    deadline_ms: int
    members: bytes = b""
    """8 bytes for each trajectory: hundreds of thousands of groups may be remembered at once."""
    recalled: bool = False
    """Closed by an earlier worker: which of its members lay further on is not known."""

    def has(self, trajectory_id: str) -> bool:
        wanted = _mark(trajectory_id)
        return any(self.members[i : i + 8] == wanted for i in range(0, len(self.members), 8))

    def add(self, trajectory_id: str) -> None:
        if not self.has(trajectory_id):
            self.members += _mark(trajectory_id)


def _mark(trajectory_id: str) -> bytes:
    return xxhash.xxh3_64_digest(trajectory_id.encode())


def _whole(entries: dict[str, Entry[H]]) -> bool:
    return len(entries) >= next(iter(entries.values())).score.trajectory_count


class GroupBook(Generic[H]):
    """Open groups and the memory of closed ones. `H` is whatever the caller wants back with each member."""

    def __init__(self) -> None:
        self._open: dict[str, _Open[H]] = {}
        self._closed: dict[str, _Closed] = {}
        self._nearest: float = math.inf
        """No open group has an earlier deadline."""

    def __len__(self) -> int:
        """Number of open groups."""
        return len(self._open)

    @property
    def nearest_deadline_ms(self) -> float:
        """No open group has an earlier one; infinite when none is open."""
        return self._nearest if self._open else math.inf

    def recall(self, group_id: str, trajectory_id: str, deadline_ms: int) -> None:
        """Take note of a record that was finished with before: its group is closed."""
        known = self._closed.setdefault(group_id, _Closed(deadline_ms, recalled=True))
        known.add(trajectory_id)

    def add(
        self, score: Score, *, offset: int, at_ms: int, handle: H
    ) -> tuple[Verdict, list[ClosedGroup[H]]]:
        """Take the record at `offset`, appended at `at_ms`; the groups that it closed, in order."""
        closed = self._expire(at_ms)
        verdict = self._place(score, offset, at_ms, handle)
        group = self._open.get(score.group_id)
        if verdict is Verdict.MEMBER and group is not None and group.is_complete():
            closed.append(self._close(score.group_id, Cause.COMPLETE))
        return verdict, closed

    def close_by_clock(self, now_ms: int) -> list[ClosedGroup[H]]:
        """Groups whose deadline is a second past; only for a partition that has been read to its end since."""
        return self._expire(now_ms - CLOCK_GRACE_MS)

    def _place(self, score: Score, offset: int, at_ms: int, handle: H) -> Verdict:
        done = self._closed.get(score.group_id)
        if done is not None and (done.has(score.trajectory_id) or _was_in(done, at_ms)):
            done.add(score.trajectory_id)  # it may be repeated again, after the deadline
            return Verdict.DUPLICATE
        group = self._open.get(score.group_id)
        if done is not None or (group is None and at_ms > score.group_deadline_ms):
            done = self._closed.setdefault(score.group_id, _Closed(score.group_deadline_ms))
            done.add(score.trajectory_id)
            return Verdict.LATE
        if group is None:
            group = self._open[score.group_id] = _Open(score.group_size, score.group_deadline_ms)
            self._nearest = min(self._nearest, group.deadline_ms)
        known = group.find(score)
        if known is None:
            entry = Entry(score, offset, handle)
            group.rollouts.setdefault(score.rollout_id, {})[score.trajectory_id] = entry
            return Verdict.MEMBER
        if known.offset != offset:
            return Verdict.DUPLICATE
        known.handle = handle
        return Verdict.AGAIN

    def _expire(self, now_ms: int) -> list[ClosedGroup[H]]:
        for name in _long_past(self._closed, now_ms):
            del self._closed[name]
        if now_ms <= self._nearest:
            return []
        overdue = [(g.deadline_ms, name) for name, g in self._open.items() if g.deadline_ms < now_ms]
        closed = [self._close(name, Cause.DEADLINE) for _, name in sorted(overdue)]
        self._nearest = min((g.deadline_ms for g in self._open.values()), default=math.inf)
        return closed

    def _close(self, group_id: str, cause: Cause) -> ClosedGroup[H]:
        group = self._open.pop(group_id)
        names = (t for entries in group.rollouts.values() for t in entries)
        self._closed[group_id] = _Closed(group.deadline_ms, b"".join(map(_mark, names)))
        return ClosedGroup(
            group_id,
            cause,
            tuple(
                Rollout(name, tuple(sorted(e.values(), key=_index)), _whole(e))
                for name, e in group.rollouts.items()
            ),
        )


def _was_in(closed: _Closed, at_ms: int) -> bool:
    """A group is sent before any of its records is acknowledged: one that was recalled was sent whole."""
    return closed.recalled and at_ms <= closed.deadline_ms


def _index(entry: Entry[H]) -> int:
    return entry.score.trajectory_index


def _long_past(closed: dict[str, _Closed], now_ms: int) -> Iterable[str]:
    """Oldest first, until one is still needed: groups close roughly in the order of their deadlines."""
    gone = []
    for name, group in closed.items():
        if group.deadline_ms + REMEMBER_MS >= now_ms:
            break
        gone.append(name)
    return gone
