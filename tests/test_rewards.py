"""Reward functions: the built-in ones, a user's own, and everything that may go wrong with them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types
from collections.abc import Awaitable, Iterator
from typing import Any

import numpy as np
import pytest
from streams_records import a_trajectory

from headrace.schemas.config import VerifyConfig
from headrace.schemas.errors import ConfigError, RewardError
from headrace.schemas.score import ScoreStatus
from headrace.schemas.trajectory import TrajectoryStatus
from headrace.streams.rewards.base import Message, RewardResult, RolloutView, view_of
from headrace.streams.rewards.builtin import addition, calculator, exact_match, numeric
from headrace.streams.rewards.load import LoadedReward, load_reward
from headrace.streams.rewards.runner import RewardRunner
from headrace.streams.verdicts import RewardBook, outcome_of, void_of


def rollout(*texts: tuple[str, str], **args: Any) -> RolloutView:
    return RolloutView(task_id="t", rollout_id="r", messages=tuple(Message(*t) for t in texts), args=args)


def answered(text: str, /, **args: Any) -> RolloutView:
    return rollout(("user", "?"), ("assistant", text), **args)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("85$", 1.0),
        ("85", 0.0),
        ("86$", 0.0),
        ("085$", 0.0),
        ("85$$", 0.0),
        (" 85$", 0.0),
        ("8 5$", 0.0),
        ("$", 0.0),
    ],
)
def test_the_calculator_wants_the_whole_answer_and_its_end_marker(answer: str, reward: float) -> None:
    episode = rollout(("user", "47+38="), ("assistant", "[47+38]"), ("tool", "85>"), ("assistant", answer))
    assert calculator(episode) == reward


def test_the_calculator_does_not_take_the_environment_for_the_model() -> None:
    assert calculator(rollout(("user", "47+38="), ("assistant", "[47+38]"), ("tool", "85$"))) == 0.0


def test_the_specs_answer_wins_over_the_prompts_sum() -> None:
    assert calculator(rollout(("user", "one and one?"), ("assistant", "2$"), answer=2)) == 1.0
    with pytest.raises(RewardError, match="reward_args"):
        calculator(rollout(("user", "one and one?"), ("assistant", "2$")))


@pytest.mark.parametrize(("answer", "reward"), [("5", 1.0), ("5$", 1.0), ("55", 0.0), ("", 0.0)])
def test_addition_may_end_without_a_marker(answer: str, reward: float) -> None:
    assert addition(rollout(("user", "2+3="), ("assistant", answer))) == reward


def test_exact_match_strips_unless_told_not_to() -> None:
    assert exact_match(answered(" Paris\n", answer="Paris")) == 1.0
    assert exact_match(answered(" Paris\n", answer="Paris", strip=False)) == 0.0
    assert exact_match(answered("paris", answer="Paris")) == 0.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("the sum is 1,234.50", 1.0), ("first 7, then 1234.5", 1.0), ("1234.5 or 7", 0.0), ("-1234.5", 0.0)],
)
def test_numeric_takes_the_last_number(answer: str, reward: float) -> None:
    assert numeric(answered(answer, answer=1234.5)) == reward


def test_numeric_without_a_number_is_a_failure_of_the_policy() -> None:
    result = numeric(answered("no idea", answer=1))
    assert isinstance(result, RewardResult) and result.failed == "no_number"
    outcome = outcome_of(result, failure_reward=-1.0)
    assert (outcome.status, outcome.reward, outcome.reason) == (ScoreStatus.FAILED, -1.0, "no_number")


@pytest.fixture
def plugin() -> Iterator[types.ModuleType]:
    """A module of a user's own."""
    module = types.ModuleType("rewards_of_a_user")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def loaded(plugin: types.ModuleType, function: Any, args: dict[str, Any] | None = None) -> LoadedReward:
    plugin.score = function  # type: ignore[attr-defined]
    return load_reward(f"{plugin.__name__}:score", args)


def run(reward: LoadedReward, *, timeout_s: float = 30.0) -> RewardResult:
    async def call() -> RewardResult:
        runner = RewardRunner(concurrency=4, timeout_s=timeout_s)
        try:
            return await runner.run(reward, answered("85$"))
        finally:
            runner.close()

    return asyncio.run(call())


def test_a_function_of_the_users_own_runs_away_from_the_event_loop(plugin: types.ModuleType) -> None:
    def score(view: RolloutView) -> float:
        return float(threading.current_thread() is not threading.main_thread() and view.answer == "85$")

    assert run(loaded(plugin, score)).value == 1.0


def test_an_async_function_is_awaited_on_a_loop_of_its_own(plugin: types.ModuleType) -> None:
    async def score(view: RolloutView) -> float:
        await asyncio.sleep(0)
        return float(threading.current_thread() is not threading.main_thread())

    reward = loaded(plugin, score)
    assert reward.is_async
    assert run(reward).value == 1.0


def test_a_class_is_made_with_the_specs_arguments(plugin: types.ModuleType) -> None:
    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        async def __call__(self, view: RolloutView) -> float:
            return self.by * len(view.answer)

    assert run(loaded(plugin, Scaled, {"by": 2.0})).value == 6.0
    with pytest.raises(ConfigError, match="Scaled"):
        loaded(plugin, Scaled, {"times": 2.0})


@pytest.mark.parametrize(
    ("returned", "value", "components"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        ({"reward": 1, "format": 0.25}, 1.0, {"format": 0.25}),
        (RewardResult(0.5, {"style": 1}), 0.5, {"style": 1.0}),
    ],
)
def test_what_a_reward_may_return(
    plugin: types.ModuleType, returned: Any, value: float, components: dict[str, float]
) -> None:
    result = run(loaded(plugin, lambda view: returned))
    assert (result.value, result.components) == (value, components)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (float("nan"), "reward_not_finite"),
        (float("inf"), "reward_not_finite"),
        ("1.0", "reward_not_number"),
        (None, "reward_not_number"),
        ({"score": 1.0}, "reward_not_number"),
        ({"reward": 1.0, "style": "good"}, "reward_not_number"),
        (RewardResult(None), "reward_not_number"),
    ],
)
def test_what_is_no_reward_voids_the_rollout(plugin: types.ModuleType, returned: Any, reason: str) -> None:
    with pytest.raises(RewardError) as caught:
        run(loaded(plugin, lambda view: returned))
    assert caught.value.reason == reason


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("mine"), SystemError("deep")])
def test_whatever_a_reward_raises_is_told_as_reward_raised(
    plugin: types.ModuleType, error: Exception
) -> None:
    def score(view: RolloutView) -> float:
        raise error

    async def score_async(view: RolloutView) -> float:
        raise error

    for function in (score, score_async, lambda view: score_async(view)):
        with pytest.raises(RewardError) as caught:
            run(loaded(plugin, function))
        assert caught.value.reason == "reward_raised"
        assert type(error).__name__ in caught.value.detail


def test_a_reward_that_hangs_runs_into_its_time_limit(plugin: types.ModuleType) -> None:
    release = threading.Event()

    async def score_async(view: RolloutView) -> Awaitable[float]:
        return await asyncio.get_running_loop().create_future()

    for function in (lambda view: float(release.wait(60)), score_async):
        with pytest.raises(RewardError) as caught:
            run(loaded(plugin, function), timeout_s=0.05)
        assert caught.value.reason == "reward_timeout"
    release.set()


def test_one_that_hangs_does_not_hold_up_the_others(plugin: types.ModuleType) -> None:
    release = threading.Event()

    async def call() -> list[Any]:
        runner = RewardRunner(concurrency=2, timeout_s=0.2)
        hangs = loaded(plugin, lambda view: float(release.wait(60)))
        plugin.quick = lambda view: 1.0  # type: ignore[attr-defined]
        quick = load_reward(f"{plugin.__name__}:quick")
        calls = [runner.run(r, answered("x")) for r in (hangs, quick, hangs, quick, quick)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        release.set()
        runner.close()
        return [getattr(f, "value", getattr(f, "reason", None)) for f in found]

    assert asyncio.run(call()) == ["reward_timeout", 1.0, "reward_timeout", 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("exact_mach", "exact_match"),
        ("no_such_module_here:score", "tried to import module 'no_such_module_here'"),
        ("json:no_such", "has no 'no_such'"),
        ("json:__doc__", "not a function"),
        (":score", "module:attr"),
    ],
)
def test_a_bad_name_is_told_with_what_was_tried(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_reward(name)


def book(**config: Any) -> RewardBook:
    return RewardBook(VerifyConfig(**config))


def test_a_trajectorys_own_spec_wins_over_the_configured_reward() -> None:
    rewards = book(reward="exact_match", reward_args={"answer": "x"})
    spec = json.dumps({"name": "numeric", "args": {"answer": 3}})
    reward, args = rewards.find(a_trajectory("r", reward_spec=spec))
    assert (reward.name, args) == ("numeric", {"answer": 3})
    reward, args = rewards.find(a_trajectory("r", reward_spec=None))
    assert (reward.name, args) == ("exact_match", {"answer": "x"})


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("not json", "reward_spec"),
        ("[]", "reward_spec"),
        ('{"args": {}}', "reward_spec"),
        ('{"name": "numeric", "args": [1]}', "reward_spec"),
        ('{"name": "no_such_reward"}', "reward_unknown"),
    ],
)
def test_a_spec_that_cannot_be_used_voids_the_rollout(spec: str, reason: str) -> None:
    with pytest.raises(RewardError) as caught:
        book().find(a_trajectory("r", reward_spec=spec))
    assert caught.value.reason == reason


def test_a_configured_reward_that_does_not_exist_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no_such_module_here"):
        book(reward="no_such_module_here:score")


def test_an_aborted_attempt_is_void_and_needs_no_reward() -> None:
    aborted = a_trajectory("r", status=TrajectoryStatus.ABORTED, reason="engine")
    outcome = void_of(aborted)
    assert outcome is not None and (outcome.status, outcome.reason) == (ScoreStatus.VOID, "aborted")
    assert void_of(a_trajectory("r")) is None


def test_a_view_shows_text_parts_and_metadata() -> None:
    messages = json.dumps([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}])
    view = view_of(a_trajectory("r", messages=messages, metadata='{"repo": "x"}'), {"k": 1})
    assert (view.answer, view.metadata, view.args) == ("ab", {"repo": "x"}, {"k": 1})


@pytest.mark.parametrize("messages", [None, "nonsense", "3", '[{"content": "no role"}]', '["text"]'])
def test_a_trajectory_without_readable_messages_is_void(messages: str | None) -> None:
    with pytest.raises(RewardError) as caught:
        view_of(a_trajectory("r", messages=messages), {})
    assert caught.value.reason == "no_messages"


@pytest.mark.parametrize(("given", "longest"), [(600, 600.0), ("90", 90.0), ("x", 0.0)])
def test_a_reward_with_a_limit_of_its_own_says_for_how_long_it_may_take(
    given: object, longest: float
) -> None:
    async def scenario() -> None:
        runner = RewardRunner(concurrency=2, timeout_s=0.1)
        during = []

        async def call(rollout: RolloutView) -> float:
            during.append(runner.longest_s)
            return 1.0

        reward = LoadedReward("own", call, inline=False, is_async=True, unlimited=True)
        view = RolloutView(task_id="t", rollout_id="r", messages=(), args={"timeout_seconds": given})
        assert (await runner.run(reward, view)).value == 1.0
        assert (during, runner.longest_s) == ([longest], 0.0)
        runner.close()

    asyncio.run(scenario())
