"""Baselines beyond the group, rewards per turn, and filters that shift nobody."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams_records import a_score
from test_groups import DEADLINE, Log, closed_group, fates, rule

from headrace.schemas.score import Score
from headrace.schemas.trajectory import Split
from headrace.streams.baselines import Baselines
from headrace.streams.estimators import ema, reinforce_pp, reinforce_pp_baseline, rloo
from headrace.streams.fates import fates_of
from headrace.streams.groups import GroupBook, Verdict
from headrace.streams.turns import rewards_to_go, turn_advantages


def test_ema_weighs_the_history_and_centres_a_lone_member_by_it() -> None:
    assert ema([1.0], [0.0, 1.0], decay=0.5) == pytest.approx([1.0 - (1.0 + 0.5 * 0.0) / 1.5])
    assert ema([0.3], [0.3] * 50) == [0.0]
    assert ema([0.7], []) == [0.0]


def test_reinforce_pp_normalises_over_history_and_group() -> None:
    assert reinforce_pp([1.0, 0.0], [1.0, 0.0]) == pytest.approx([0.5 / 0.5001, -0.5 / 0.5001])
    assert reinforce_pp([0.1] * 2, [0.1] * 5) == [0.0, 0.0]
    assert reinforce_pp([1.0, 1.0], [0.0, 0.0])[0] > 0.9


def test_its_variant_takes_the_mean_of_the_group() -> None:
    assert reinforce_pp_baseline([1.0, 1.0], [0.0, 0.0]) == [0.0, 0.0]
    assert reinforce_pp_baseline([1.0], [0.0, 1.0, 0.0]) == reinforce_pp([1.0], [0.0, 1.0, 0.0])


def test_evaluations_void_and_repeated_records_are_in_no_history() -> None:
    book = Baselines(8)
    book.observe(a_score("a", 1.0), 0)
    book.observe(a_score("b", 5.0, split=Split.EVAL), 1)
    book.observe(a_score("c", None), 2)
    book.observe(a_score("a", 7.0), 3)
    book.observe(a_score("d", 9.0), 2)
    book.open("g", a_score("x").policy_id)
    assert book.close("g") == (1.0,)


def test_only_the_last_rewards_of_the_same_policy_count() -> None:
    book = Baselines(3)
    for i in range(10):
        book.observe(a_score(f"r{i}", float(i)), i)
        book.observe(a_score(f"o{i}", -1.0, policy_id="other"), 100 * (i + 1))
    book.open("g", "other")
    assert book.close("g") == (-1.0,) * 3


def stage(
    records: list[tuple[int, Score]], start: int, window: int, back: int, rng: random.Random | None = None
) -> dict[str, list[tuple[str, float | None]]]:
    """Advantages per group of a worker that starts at offset `start` after recalling `back` records."""
    book: GroupBook[int] = GroupBook()
    baselines = Baselines(window)
    for offset in range(max(0, start - back), start):
        score = records[offset][1]
        book.recall(score.group_id, score.trajectory_id, score.group_deadline_ms)
        baselines.observe(score, offset)
    found: dict[str, list[tuple[str, float | None]]] = {}
    offset, ema_rule = start, rule(estimator="ema", window=window)
    closed = []

    def send(groups: list) -> None:
        for group in groups:
            samples = fates_of(group, ema_rule, lambda p: 0, 1, baselines.close(group.group_id))
            found[group.group_id] = [(s.trajectory_id, s.advantage) for s in samples]

    while offset < len(records):
        at, score = records[offset]
        verdict, closed = book.add(score, offset=offset, at_ms=at, handle=offset)
        if verdict is Verdict.MEMBER:
            baselines.open(score.group_id, score.policy_id)
        baselines.observe(score, offset)
        send(closed)
        offset += 1
        if rng is not None and rng.random() < 0.2:
            offset = rng.randrange(max(start, offset - 5), offset)
    send(book.close_by_clock(DEADLINE + 5000))
    return found


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12), seed=st.integers(0, 10**6))
def test_a_restart_and_a_re_read_give_the_same_advantages(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    records = [
        (rng.randrange(0, DEADLINE + 500), a_score(f"{g}-{i}", rng.random(), group=f"g{g}", size=size))
        for g, size in enumerate(sizes)
        for i in range(size)
        if rng.random() > 0.1
    ]
    records.sort(key=lambda r: r[0])
    once = stage(records, 0, 5, 0)
    assert stage(records, 0, 5, 0, rng) == once
    for start in range(len(records)):
        whole = {s.group_id for _, s in records[start:]} - {s.group_id for _, s in records[:start]}
        again = stage(records, start, 5, 5, rng)
        assert {g: again[g] for g in whole if g in again} == {g: once[g] for g in whole if g in once}


def test_the_late_fourth_is_late_again_after_a_restart() -> None:
    records = [(i, a_score(f"r{i}", float(i))) for i in range(3)]
    records += [(DEADLINE + 1, a_score("r3", 3.0))]
    first, second = GroupBook[int](), GroupBook[int]()
    seen = []
    for book in (
        first,
        second,
    ):  # the second reads from the first's committed offset: 0, nothing was committed
        closed, verdicts = [], []
        for offset, (at, score) in enumerate(records):
            if book is first and offset == 3:  # the clock spoke first
                closed += book.close_by_clock(DEADLINE + 2000)
            verdict, more = book.add(score, offset=offset, at_ms=at, handle=offset)
            closed += more
            verdicts.append(verdict)
        seen.append(([[s.advantage for s in fates(g)] for g in closed], verdicts))
    assert seen[0] == seen[1]
    assert seen[0] == ([[-1.5, 0.0, 1.5]], [Verdict.MEMBER] * 3 + [Verdict.LATE])


def test_the_first_member_sets_the_deadline_and_the_size_of_its_group() -> None:
    log = Log()
    log.add(a_score("r0", 1.0, size=2))
    log.add(a_score("r1", 0.0, size=9, group_deadline_ms=1), at_ms=5)
    assert log.rewards() == {"g": [1.0, 0.0]}


def test_a_member_dropped_as_over_long_shifts_nobody() -> None:
    log = Log()
    for i in range(4):
        log.add(a_score(f"a{i}", float(i), group="a", total_tokens=100 if i == 3 else 10, sampled_tokens=5))
        log.add(a_score(f"b{i}", float(i), group="b", total_tokens=10, sampled_tokens=5))
    free, limited = ([fates(g, **s) for g in log.closed] for s in ({}, {"max_tokens": 50}))
    advantages = [[[s.advantage for s in g] for g in found] for found in (free, limited)]
    assert advantages[0] == advantages[1]
    assert [s.reason for s in limited[0]] == [None, None, None, "over_long"]
    assert [s.reason for s in limited[1]] == [None] * 4
    assert all(s.reason is None for g in log.closed for s in fates(g, max_tokens=50, max_tokens_of="sampled"))


def test_rewards_to_go() -> None:
    assert rewards_to_go([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    assert rewards_to_go([], 1.0) == []


def test_turns_are_compared_with_the_same_turn_of_the_others_and_0_after_their_end() -> None:
    short, long = turn_advantages([[1.0], [0.0, 3.0]], rloo, 1.0)
    np.testing.assert_allclose(short, [-2.0])
    np.testing.assert_allclose(long, [2.0, 3.0])


def test_rewards_per_turn_become_advantages_per_turn() -> None:
    log = Log()
    log.add(a_score("a", 1.0, size=2, turn_rewards=(0.0, 1.0)))
    log.add(a_score("b", 1.0, size=2, turn_rewards=(1.0, 0.0)))
    a, b = fates(log.closed[0], drop_zero_variance=True)
    assert a.turn_advantages is not None and b.turn_advantages is not None
    assert (a.turn_advantages.tolist(), b.turn_advantages.tolist()) == ([0.0, 1.0], [0.0, -1.0])
    assert (a.advantage, a.reason) == (0.0, None), "equal sums, but not the same turns"


def test_a_group_in_which_some_have_no_rewards_per_turn_goes_by_the_sums() -> None:
    log = Log()
    log.add(a_score("a", 1.0, size=2, turn_rewards=(0.0, 1.0)))
    log.add(a_score("b", 0.0, size=2))
    assert [(s.advantage, s.turn_advantages) for s in fates(log.closed[0])] == [(1.0, None), (-1.0, None)]


def test_lone_members_keep_their_signal_where_a_history_is_the_baseline() -> None:
    (sample,) = fates_of(
        closed_group([1.0]), rule(estimator="ema", drop_zero_variance=True), lambda p: 0, 1, (0.0, 0.0)
    )
    assert (sample.advantage, sample.reason) == (1.0, None)


def test_max_lag_0_admits_the_current_version_only() -> None:
    log = Log()
    log.add(a_score("old", 1.0, size=2, version_min=6, version_max=7))
    log.add(a_score("new", 0.0, size=2, version_min=7, version_max=7))
    strict = rule()
    strict = type(strict)(**{f: getattr(strict, f) for f in strict.__slots__} | {"max_lag": 0})
    assert [s.reason for s in fates_of(log.closed[0], strict, lambda p: 7, 1)] == ["stale", None]
    assert [s.reason for s in fates_of(log.closed[0], strict, lambda p: 8, 1)] == ["stale", "stale"]
