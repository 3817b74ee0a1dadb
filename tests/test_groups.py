"""When a group closes, who is in it, and what becomes of its members."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams_records import a_score

from headrace.schemas.config import AdvantageConfig, StalenessConfig
from headrace.schemas.sample import SAMPLE, Fate, Sample, sample_headers
from headrace.schemas.score import Score
from headrace.schemas.trajectory import Split
from headrace.streams.fates import FateRule, fates_of, late_fate
from headrace.streams.groups import REMEMBER_MS, Cause, ClosedGroup, GroupBook, Verdict

DEADLINE = 10_000


class Log:
    """A partition of `scores`: records with offsets and append times, read by one book."""

    def __init__(self) -> None:
        self.book: GroupBook[int] = GroupBook()
        self.offset = 0
        self.closed: list[ClosedGroup[int]] = []

    def add(self, score: Score, at_ms: int = 0) -> Verdict:
        verdict, closed = self.book.add(score, offset=self.offset, at_ms=at_ms, handle=self.offset)
        self.offset += 1
        self.closed += closed
        return verdict

    def rewards(self) -> dict[str, list[float | None]]:
        return {g.group_id: [r.reward for r in g.rollouts] for g in self.closed}


def rule(**settings: Any) -> FateRule:
    return FateRule.of(AdvantageConfig(**settings), StalenessConfig(max_lag=4))


def fates(group: ClosedGroup[Any], version: int | None = 0, **settings: Any) -> list[Sample]:
    found = fates_of(group, rule(**settings), lambda policy: version, 1)
    for sample in found:  # whatever its fate, it can be sent
        SAMPLE.decode(SAMPLE.encode(sample), sample_headers(sample))
    return found


def closed_group(rewards: list[float | None], **other: Any) -> ClosedGroup[int]:
    log = Log()
    for i, reward in enumerate(rewards):
        log.add(a_score(f"r{i}", reward, size=len(rewards), **other))
    assert len(log.closed) == 1
    return log.closed[0]


def test_a_void_member_is_neither_trained_nor_in_the_baseline() -> None:
    one, void, zero = fates(closed_group([1.0, None, 0.0]))
    assert (one.group_mean, one.group_valid) == (0.5, 2)
    assert (one.advantage, zero.advantage) == (1.0, -1.0)
    assert (one.fate, zero.fate) == (Fate.ADMITTED, Fate.ADMITTED)
    assert (void.fate, void.reason, void.advantage, void.reward) == (Fate.DROPPED, "void", None, None)


def test_a_constant_group_gives_exactly_zero_and_is_still_admitted() -> None:
    found = fates(closed_group([1.0] * 4))
    assert [s.advantage for s in found] == [0.0] * 4
    assert all(s.fate is Fate.ADMITTED for s in found)


def test_one_valid_member_of_four_gets_exactly_zero() -> None:
    found = fates(closed_group([None, 0.25, None, None]))
    assert [s.advantage for s in found] == [None, 0.0, None, None]
    assert [s.reason for s in found] == ["void", None, "void", "void"]


def test_an_all_void_group_trains_nothing() -> None:
    found = fates(closed_group([None, None]))
    assert [(s.reason, s.group_mean, s.group_valid) for s in found] == [("void", None, 0)] * 2


def test_interleaved_groups_each_get_their_own_mean() -> None:
    log = Log()
    for i in range(4):
        log.add(a_score(f"a{i}", float(i), group="a"))
        log.add(a_score(f"b{i}", 10.0 * i, group="b"))
    assert [(g.group_id, g.cause) for g in log.closed] == [("a", Cause.COMPLETE), ("b", Cause.COMPLETE)]
    assert [fates(g)[0].group_mean for g in log.closed] == [1.5, 15.0]


def test_three_members_and_a_void_marker_close_at_once() -> None:
    log = Log()
    for i, reward in enumerate([1.0, 0.0, 1.0]):
        log.add(a_score(f"r{i}", reward))
    assert log.closed == []
    log.add(a_score("r3", None))
    assert log.closed[0].cause is Cause.COMPLETE


def test_three_members_and_silence_close_at_the_deadline() -> None:
    log = Log()
    for i in range(3):
        log.add(a_score(f"r{i}", float(i)), at_ms=DEADLINE)
    assert log.book.close_by_clock(DEADLINE + 1000) == []
    (group,) = log.book.close_by_clock(DEADLINE + 1001)
    assert group.cause is Cause.DEADLINE
    assert [s.advantage for s in fates(group)] == [-1.5, 0.0, 1.5]
    assert log.book.close_by_clock(DEADLINE + 9999) == []


def test_a_later_record_of_the_partition_closes_what_is_overdue() -> None:
    log = Log()
    log.add(a_score("r0"))
    log.add(a_score("x0", group="other", group_deadline_ms=99_999), at_ms=DEADLINE)
    assert log.closed == []
    log.add(a_score("x1", group="other", group_deadline_ms=99_999), at_ms=DEADLINE + 1)
    assert [(g.group_id, g.cause) for g in log.closed] == [("g", Cause.DEADLINE)]


def test_what_comes_after_its_group_closed_is_late_and_never_reopens_it() -> None:
    log = Log()
    log.add(a_score("r0"))
    assert log.add(a_score("r1"), at_ms=DEADLINE + 1) is Verdict.LATE
    assert [len(g.rollouts) for g in log.closed] == [1]
    assert len(log.book) == 0
    sample = late_fate(a_score("r1"), 1)
    assert (sample.fate, sample.reason) == (Fate.DROPPED, "late")


def test_a_late_member_of_a_group_nobody_saw_is_late() -> None:
    log = Log()
    assert log.add(a_score("r0"), at_ms=DEADLINE + 1) is Verdict.LATE
    assert log.add(a_score("r0"), at_ms=DEADLINE + 2) is Verdict.DUPLICATE


def test_repeats_are_told_from_members_before_and_after_closing() -> None:
    log = Log()
    log.add(a_score("r0", 1.0, size=2))
    assert log.add(a_score("r0", 0.0, size=2)) is Verdict.DUPLICATE
    log.add(a_score("r1", 0.5, size=2))
    assert log.add(a_score("r1", 0.0, size=2), at_ms=DEADLINE + 5) is Verdict.DUPLICATE
    assert log.rewards() == {"g": [1.0, 0.5]}


def test_the_same_record_read_again_replaces_its_handle() -> None:
    book: GroupBook[str] = GroupBook()
    book.add(a_score("r0", size=2), offset=7, at_ms=0, handle="first reading")
    verdict, _ = book.add(a_score("r0", size=2), offset=7, at_ms=0, handle="second reading")
    _, (group,) = book.add(a_score("r1", size=2), offset=8, at_ms=0, handle="other")
    assert verdict is Verdict.AGAIN
    assert [e.handle for e in group.entries] == ["second reading", "other"]


def test_closed_groups_are_forgotten_in_the_end() -> None:
    log = Log()
    log.add(a_score("r0", size=1))
    log.add(a_score("x", group="later", size=1, group_deadline_ms=10**9), at_ms=DEADLINE + REMEMBER_MS + 1)
    assert log.add(a_score("r0", size=1), at_ms=DEADLINE + REMEMBER_MS + 1) is Verdict.LATE


def test_what_was_closed_before_a_restart_stays_closed() -> None:
    book: GroupBook[int] = GroupBook()
    book.recall("g", "r0.0", DEADLINE)
    assert book.add(a_score("r0"), offset=9, at_ms=0, handle=0)[0] is Verdict.DUPLICATE
    assert book.add(a_score("r1"), offset=10, at_ms=DEADLINE, handle=0)[0] is Verdict.DUPLICATE
    assert book.add(a_score("r2"), offset=11, at_ms=DEADLINE + 1, handle=0)[0] is Verdict.LATE


def two_parts(rollout: str, first: float | None, last: float | None, **other: Any) -> list[Score]:
    return [
        a_score(rollout, reward, trajectory_index=i, trajectory_count=2, **other)
        for i, reward in enumerate([first, last])
    ]


def test_trajectories_of_one_rollout_share_reward_and_advantage() -> None:
    log = Log()
    for score in [*reversed(two_parts("a", 0.3, 1.0, size=2)), a_score("b", 0.0, size=2)]:
        log.add(score)
    found = fates(log.closed[0])
    assert [(s.trajectory_id, s.reward, s.advantage) for s in found] == [
        ("a.0", 1.0, 1.0),
        ("a.1", 1.0, 1.0),
        ("b.0", 0.0, -1.0),
    ]


def test_a_rollout_with_a_missing_or_void_trajectory_does_not_count() -> None:
    log = Log()
    log.add(two_parts("a", 1.0, 1.0)[0])
    log.add(a_score("b", 0.0))
    for score in two_parts("c", None, 1.0):
        log.add(score)
    (group,) = log.book.close_by_clock(DEADLINE + 2000)
    assert [s.reason for s in fates(group)] == ["late", None, "void", "void"]


def test_filters_come_after_the_advantage_and_shift_nobody() -> None:
    log = Log()
    log.add(a_score("a", 1.0, truncated=True))
    log.add(a_score("b", 0.0, version_min=2, version_max=7))
    log.add(a_score("c", 0.0, split=Split.EVAL))
    log.add(a_score("d", 1.0, version_min=3, version_max=7))
    found = fates(log.closed[0], version=7, drop_truncated=True)
    assert [s.reason for s in found] == ["truncated", "stale", "eval", None]
    assert found[2].advantage is None
    assert [s.advantage for s in found if s.advantage is not None] == pytest.approx([0.5, -1.0, 0.5])
    assert found[0].group_mean == pytest.approx(2 / 3), "an evaluation enters no baseline"


def test_zero_variance_groups_are_dropped_only_on_demand() -> None:
    found = fates(closed_group([1.0, 1.0]), drop_zero_variance=True)
    assert [(s.reason, s.advantage) for s in found] == [("zero_variance", 0.0)] * 2
    assert all(s.reason is None for s in fates(closed_group([1.0, 0.0]), drop_zero_variance=True))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce_pp", "ema"])
def test_rewards_too_large_to_reckon_with_drop_their_group_and_stop_nothing(estimator: str) -> None:
    found = fates(closed_group([1e308, 1e308, -1e308, None]), estimator=estimator)
    assert [s.reason for s in found] == [*["advantage_not_finite"] * 3, "void"]
    assert all(s.advantage is None for s in found)


def test_a_rollout_with_one_trajectory_of_the_eval_split_trains_none_of_them() -> None:
    log = Log()
    log.add(a_score("a", 1.0, size=2, trajectory_count=2, split=Split.EVAL))
    log.add(a_score("a", 1.0, size=2, trajectory_count=2, trajectory_index=1))
    log.add(a_score("b", 0.0, size=2))
    assert [s.reason for s in fates(log.closed[0])] == ["eval", "eval", None]


GROUPS = st.lists(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=5), min_size=1, max_size=5
)


def log_of(groups: list[list[float | None]], rng: random.Random) -> list[tuple[int, Score]]:
    """(append time, score): some members late or missing, some repeated with another reward, in any order."""
    records = []
    for g, rewards in enumerate(groups):
        for i, reward in enumerate(rewards):
            if rng.random() < 0.1:
                continue
            score = a_score(f"{g}-{i}", reward, group=f"g{g}", size=len(rewards))
            at = rng.randrange(0, DEADLINE + 500)
            records.append((at, score))
            if rng.random() < 0.3:
                repeat = a_score(f"{g}-{i}", 0.5, group=f"g{g}", size=len(rewards))
                records.append((at + rng.randrange(0, 3000), repeat))
    return sorted(records, key=lambda r: r[0])


def read(records: list[tuple[int, Score]], rng: random.Random | None) -> dict[str, list[Any]]:
    """The groups that a reader closes; with `rng` it jumps back every now and then, as a re-read does."""
    book: GroupBook[int] = GroupBook()
    closed: list[ClosedGroup[int]] = []
    offset = 0
    while offset < len(records):
        at, score = records[offset]
        closed += book.add(score, offset=offset, at_ms=at, handle=offset)[1]
        offset += 1
        if rng is not None and rng.random() < 0.1:
            offset = rng.randrange(max(0, offset - 6), offset)
    closed += book.close_by_clock(DEADLINE + 5000)
    names = [g.group_id for g in closed]
    assert len(names) == len(set(names)), "a group was closed twice"
    return {g.group_id: [(r.rollout_id, r.reward) for r in g.rollouts] for g in closed}


@settings(max_examples=200, deadline=None)
@given(groups=GROUPS, seed=st.integers(0, 10**6))
def test_any_interleaving_and_any_replay_close_each_group_alike(
    groups: list[list[float | None]], seed: int
) -> None:
    rng = random.Random(seed)
    records = log_of(groups, rng)
    once = read(records, None)
    assert read(records, rng) == once
    for g in range(len(groups)):
        first: dict[str, float | None] = {}
        for at, score in records:
            if score.group_id == f"g{g}" and at <= DEADLINE:
                first.setdefault(score.rollout_id, score.reward)
        assert once.get(f"g{g}", []) == list(first.items())


@settings(max_examples=100, deadline=None)
@given(groups=GROUPS, seed=st.integers(0, 10**6))
def test_a_restart_at_the_committed_offset_sends_each_open_group_whole(
    groups: list[list[float | None]], seed: int
) -> None:
    rng = random.Random(seed)
    records = log_of(groups, rng)
    once = read(records, None)
    stop = rng.randrange(0, len(records) + 1)
    book: GroupBook[int] = GroupBook()
    sent: dict[str, list[Any]] = {}
    held: set[int] = set()
    for offset in range(stop):
        at, score = records[offset]
        verdict, closed = book.add(score, offset=offset, at_ms=at, handle=offset)
        held |= {offset} if verdict is Verdict.MEMBER else set()
        for group in closed:
            sent[group.group_id] = [(r.rollout_id, r.reward) for r in group.rollouts]
            held -= {e.handle for e in group.entries}
    committed = min(held, default=stop)

    book = GroupBook()
    for _, score in records[:committed]:
        book.recall(score.group_id, score.trajectory_id, score.group_deadline_ms)
    for offset in range(committed, len(records)):
        at, score = records[offset]
        verdict, closed = book.add(score, offset=offset, at_ms=at, handle=offset)
        assert verdict is not Verdict.LATE or at > DEADLINE
        for group in closed:
            again = [(r.rollout_id, r.reward) for r in group.rollouts]
            assert sent.get(group.group_id, again) == again
            sent[group.group_id] = again
    for group in book.close_by_clock(DEADLINE + 5000):
        sent[group.group_id] = [(r.rollout_id, r.reward) for r in group.rollouts]
    assert sent == once


def test_a_member_read_again_after_a_restart_is_no_late_one_when_it_is_repeated_past_the_deadline() -> None:
    log = Log()
    log.book.recall("g", "r0.0", DEADLINE)  # below the committed offset: the group was closed and sent
    assert log.add(a_score("r1"), at_ms=DEADLINE - 1) is Verdict.DUPLICATE
    assert log.add(a_score("r1"), at_ms=DEADLINE + 1) is Verdict.DUPLICATE
    assert log.add(a_score("r2"), at_ms=DEADLINE + 1) is Verdict.LATE
