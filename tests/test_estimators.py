"""Advantages with known answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.streams.estimators import ESTIMATORS, dr_grpo, grpo, rloo

EVERY = sorted(ESTIMATORS)
REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=0, max_size=16)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("rewards", [[], [0.7], [1.0] * 4, [0.1] * 3, [-1e-300] * 5])
def test_a_constant_group_and_a_lone_member_give_exactly_zero(name: str, rewards: list[float]) -> None:
    assert ESTIMATORS[name](rewards) == [0.0] * len(rewards)


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    for i, advantage in enumerate(rloo(rewards)):
        others = rewards[:i] + rewards[i + 1 :]
        assert advantage == pytest.approx(rewards[i] - sum(others) / 3)


def test_known_answers_for_one_and_zero() -> None:
    assert rloo([1.0, 0.0]) == [1.0, -1.0]
    assert dr_grpo([1.0, 0.0]) == [0.5, -0.5]
    assert grpo([1.0, 0.0]) == pytest.approx([0.5 / (math.sqrt(0.5) + 1e-4), -0.5 / (math.sqrt(0.5) + 1e-4)])


@pytest.mark.parametrize("name", EVERY)
@given(rewards=REWARDS)
def test_advantages_are_finite_and_sum_to_nothing(name: str, rewards: list[float]) -> None:
    advantages = ESTIMATORS[name](rewards)
    assert len(advantages) == len(rewards)
    assert all(map(math.isfinite, advantages))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6 * (1 + sum(map(abs, advantages))))
