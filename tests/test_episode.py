"""One rollout: token-exact, masked where it must be, and with a record however it ends."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import calculate, ids_of, result, text_of, write_policy

from headrace.producers.engines.protocol import GenerateRequest, GenerateResult
from headrace.producers.environments import calls
from headrace.producers.environments.base import Observation, load_environment
from headrace.producers.environments.calculator import Calculator
from headrace.producers.rollout.episode import Episode, Group
from headrace.producers.rollout.tokenizing import PolicyTokenizer, load_tokenizer
from headrace.schemas.errors import EngineError
from headrace.schemas.task import Task
from headrace.schemas.trajectory import TRAJECTORY, Sampling, Trajectory, TrajectoryStatus, Turn, VersionSpan

EOS = 15


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return load_tokenizer(write_policy(tmp_path_factory.mktemp("policy")))


def group(
    prompt: str = "47+38=",
    *,
    max_tokens: int = 16,
    max_turns: int = 4,
    max_total: int = 64,
    environment_seconds: float = 60.0,
) -> Group:
    return Group(
        group_id="g",
        task=Task(task_id="t", policy_id="p", prompt=prompt, reward_spec='{"name": "sum"}'),
        size=2,
        deadline_ms=10**13,
        prompt=prompt,
        prompt_ids=ids_of(prompt),
        sampling=Sampling(max_tokens=max_tokens),
        stop_token_ids=(EOS, 13),
        max_turns=max_turns,
        max_total_tokens=max_total,
        environment_seconds=environment_seconds,
    )


Answer = Callable[[GenerateRequest], GenerateResult]


class Engine:
    """Answers by a function and keeps the requests."""

    def __init__(self, answer: Answer = lambda r: result(r, calculate(text_of(r.token_ids)))) -> None:
        self.answer = answer
        self.requests: list[GenerateRequest] = []

    async def __call__(self, request: GenerateRequest, prefer: str | None) -> tuple[str, GenerateResult]:
        self.requests.append(request)
        return "engine-1", self.answer(request)


def play(
    tokenizer: PolicyTokenizer,
    engine: Engine | None = None,
    *,
    environment: Callable[[], Any] | str = "calculator",
    **limits: Any,
) -> Trajectory:
    """One episode's record, which every record must survive on the wire."""
    clock = iter(range(1000, 2000))
    episode = Episode(
        group(**limits),
        "g.0",
        environment=load_environment(environment) if isinstance(environment, str) else environment,
        tokenizer=tokenizer,
        generate=engine or Engine(),
        now_ms=lambda: next(clock),
    )
    return TRAJECTORY.decode(TRAJECTORY.encode(asyncio.run(episode.run())))


def test_the_calculator_episode_is_recorded_token_by_token(tokenizer: PolicyTokenizer) -> None:
    engine = Engine()
    t = play(tokenizer, engine)
    assert text_of(tuple(t.token_ids)) == "47+38=[47+38]85>85$"
    assert "".join("x" if m else "." for m in t.loss_mask) == "......xxxxxxx...xxx"
    assert t.logprobs.tolist() == [0.0] * 6 + [-0.5 * i for i in range(1, 8)] + [0.0] * 3 + [-0.5, -1.0, -1.5]
    assert t.turns == (
        Turn(start=6, end=13, finish_reason="stop"),
        Turn(start=16, end=19, finish_reason="stop"),
    )
    assert t.version_spans == (VersionSpan(0, 6, 13), VersionSpan(0, 16, 19))
    assert (t.status, t.stop_reason, t.engine_id) == (TrajectoryStatus.COMPLETED, "stop", "engine-1")
    assert json.loads(t.messages or "") == [
        {"role": "user", "content": "47+38="},
        {"role": "assistant", "content": "[47+38]"},
        {"role": "tool", "content": "85>"},
        {"role": "assistant", "content": "85$"},
    ]
    assert t.stamps == (("rollout_start", 1000), ("rollout_end", 1001))
    assert t.reward_spec == '{"name": "sum"}'
    assert engine.requests[1].token_ids == ids_of("47+38=[47+38]85>")


def test_a_sampled_end_of_sequence_token_is_trained_with_its_own_logprob(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer)
    assert t.token_ids[-1] == EOS
    assert t.loss_mask[-1]
    assert t.logprobs[-1] == -1.5


def test_spans_of_updates_within_a_turn_move_to_the_trajectorys_positions(tokenizer: PolicyTokenizer) -> None:
    spans = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 6), VersionSpan(6, 6, 7))

    def answer(request: GenerateRequest) -> GenerateResult:
        text = calculate(text_of(request.token_ids))
        return result(request, text, version=6, spans=spans if len(text) == 7 else None)

    t = play(tokenizer, Engine(answer))
    assert t.version_spans == (
        VersionSpan(3, 6, 8),
        VersionSpan(4, 8, 12),
        VersionSpan(6, 12, 13),
        VersionSpan(6, 16, 19),
    )
    assert (t.version_min, t.version_max) == (3, 6)


def test_ids_that_the_tokenizer_would_write_otherwise_stay_as_sampled(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer, Engine(lambda r: result(r, " 0 0 ")), environment="single_turn")
    assert tuple(t.token_ids) == ids_of("47+38= 0 0 ")


def test_a_malformed_call_ends_the_episode_and_is_trained(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer, Engine(lambda r: result(r, "[47+]")))
    assert (t.status, t.stop_reason) == (TrajectoryStatus.COMPLETED, "malformed_call")
    assert t.sampled_tokens == 5


def test_a_turn_cut_by_its_limit_says_so(tokenizer: PolicyTokenizer) -> None:
    t = play(
        tokenizer, Engine(lambda r: result(r, "1" * r.max_tokens, finish="length")), environment="single_turn"
    )
    assert t.stop_reason == "length"
    assert t.truncated
    assert t.sampled_tokens == 16


def test_no_turn_is_asked_for_more_than_the_total_leaves(tokenizer: PolicyTokenizer) -> None:
    engine = Engine()
    t = play(tokenizer, engine, max_total=20)
    assert [r.max_tokens for r in engine.requests] == [14, 4]
    assert len(t.token_ids) == 19


def test_an_observation_that_leaves_no_room_ends_the_episode_at_the_limit(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer, max_total=16)
    assert (t.status, t.stop_reason) == (TrajectoryStatus.COMPLETED, "length")
    assert text_of(tuple(t.token_ids)) == "47+38=[47+38]"


def test_the_turn_limit_ends_the_episode(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer, max_turns=1)
    assert (t.status, t.stop_reason, len(t.turns)) == (TrajectoryStatus.COMPLETED, "max_turns", 1)


class Broken:
    """Fails at one point."""

    def __init__(self, at: str) -> None:
        self.at, self.closed = at, False

    def start(self, task: Task) -> None:
        if self.at == "start":
            raise RuntimeError("no sandbox")

    def step(self, text: str, token_ids: Sequence[int]) -> None:
        raise RuntimeError("the sandbox died")

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("at", "tokens"), [("start", 6), ("step", 13)])
def test_an_environment_that_breaks_aborts_the_rollout(
    tokenizer: PolicyTokenizer, at: str, tokens: int
) -> None:
    broken = Broken(at)
    t = play(tokenizer, environment=lambda: broken)
    assert (t.status, t.reason) == (TrajectoryStatus.ABORTED, "environment")
    assert len(t.token_ids) == tokens
    assert "sandbox" in json.loads(t.metadata or "")["detail"]
    assert broken.closed


def test_an_environment_that_cannot_be_built_aborts_the_rollout(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer, environment=lambda: 1 / 0)
    assert (t.status, t.reason) == (TrajectoryStatus.ABORTED, "environment")


def test_an_engine_that_fails_aborts_the_rollout(tokenizer: PolicyTokenizer) -> None:
    def answer(request: GenerateRequest) -> GenerateResult:
        raise EngineError("gone")

    t = play(tokenizer, Engine(answer))
    assert (t.status, t.reason, t.version_min) == (TrajectoryStatus.ABORTED, "engine", -1)


def test_tokens_of_an_aborted_turn_are_kept(tokenizer: PolicyTokenizer) -> None:
    t = play(tokenizer, Engine(lambda r: result(r, "[47", finish="abort")))
    assert (t.status, t.reason, t.sampled_tokens) == (TrajectoryStatus.ABORTED, "engine_abort", 3)


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": (-1.0,)},
        {"logprobs": (-1.0, float("nan"))},
        {"logprobs": (-1.0, 0.5)},
        {"token_ids": (1, 17)},
        {"token_ids": (), "logprobs": (), "version_spans": ()},
        {"version_spans": (VersionSpan(0, 0, 1),)},
        {"version_spans": (VersionSpan(0, 0, 1), VersionSpan(0, 0, 2))},
        {"version_spans": (VersionSpan(-1, 0, 2),)},
    ],
)
def test_a_torn_engine_result_is_never_recorded(tokenizer: PolicyTokenizer, change: dict[str, Any]) -> None:
    def answer(request: GenerateRequest) -> GenerateResult:
        whole = result(request, "12")
        fields = {name: getattr(whole, name) for name in GenerateResult.__slots__}
        return GenerateResult(**{**fields, **change})

    t = play(tokenizer, Engine(answer))
    assert (t.status, t.reason, t.sampled_tokens) == (TrajectoryStatus.ABORTED, "engine", 0)


def test_a_logprob_that_rounding_left_above_zero_becomes_zero(tokenizer: PolicyTokenizer) -> None:
    def answer(request: GenerateRequest) -> GenerateResult:
        return GenerateResult(
            request_id=request.request_id,
            token_ids=(1, EOS),
            logprobs=(3e-8, -1.0),
            version_spans=(VersionSpan(0, 0, 2),),
            finish_reason="stop",
        )

    t = play(tokenizer, Engine(answer), environment="single_turn")
    assert t.logprobs[-2:].tolist() == [0.0, -1.0]


def test_a_rollout_cut_short_leaves_a_record_with_what_it_had(
    tokenizer: PolicyTokenizer,
) -> None:
    async def run() -> Trajectory:
        stuck = asyncio.Event()

        async def generate(request: GenerateRequest, prefer: str | None) -> tuple[str, GenerateResult]:
            if prefer is not None:
                stuck.set()
                await asyncio.Event().wait()
            return "engine-1", result(request, calculate(text_of(request.token_ids)))

        episode = Episode(
            group(),
            "g.0",
            environment=load_environment("calculator"),
            tokenizer=tokenizer,
            generate=generate,
            now_ms=lambda: 0,
        )
        task = asyncio.create_task(episode.run())
        await stuck.wait()
        episode.abort("deadline", task)
        return await task

    t = asyncio.run(run())
    assert (t.status, t.reason, t.sampled_tokens) == (TrajectoryStatus.ABORTED, "deadline", 7)
    assert t.stop_reason == "abort"


def test_a_rollout_cut_short_before_it_began_leaves_a_record_too(tokenizer: PolicyTokenizer) -> None:
    async def run() -> Trajectory:
        episode = Episode(
            group(),
            "g.0",
            environment=load_environment("calculator"),
            tokenizer=tokenizer,
            generate=Engine(),
            now_ms=lambda: 0,
        )
        task = asyncio.create_task(episode.run())
        episode.abort("shutdown", task)
        return await task

    t = asyncio.run(run())
    assert (t.status, t.reason, t.sampled_tokens) == (TrajectoryStatus.ABORTED, "shutdown", 0)


def test_an_abort_never_takes_the_record_of_a_rollout_that_is_over(tokenizer: PolicyTokenizer) -> None:
    class SlowToClose(Broken):
        closing = asyncio.Event()

        def step(self, text: str, token_ids: Sequence[int]) -> None:
            return None

        async def close(self) -> None:  # type: ignore[override]
            self.closing.set()
            await asyncio.sleep(0.01)

    async def run() -> Trajectory:
        episode = Episode(
            group(),
            "g.0",
            environment=lambda: SlowToClose(""),
            tokenizer=tokenizer,
            generate=Engine(),
            now_ms=lambda: 0,
        )
        task = asyncio.create_task(episode.run())
        await SlowToClose.closing.wait()
        episode.abort("deadline", task)
        return await task

    assert asyncio.run(run()).status is TrajectoryStatus.COMPLETED


def test_an_async_environment_may_open_with_an_observation(tokenizer: PolicyTokenizer) -> None:
    class Opening:
        async def start(self, task: Task) -> Observation:
            return Observation(text="1+1=")

        async def step(self, text: str, token_ids: Sequence[int]) -> None:
            assert tuple(token_ids) == ids_of(text)

    t = play(tokenizer, Engine(), environment=Opening, prompt="0 ")
    assert text_of(tuple(t.token_ids)) == "0 1+1=[1+1]"
    assert t.loss_mask.tolist() == [False] * 6 + [True] * 5


def test_special_tokens_in_what_an_environment_says_abort_where_there_is_no_ordinary_form(
    tokenizer: PolicyTokenizer,
) -> None:
    class Evil(Broken):
        def step(self, text: str, token_ids: Sequence[int]) -> Observation:  # type: ignore[override]
            return Observation(text="85$")

    t = play(tokenizer, environment=lambda: Evil(""))
    assert (t.status, t.reason) == (TrajectoryStatus.ABORTED, "special_token")


def test_messages_after_raw_text_cannot_be_rendered(tokenizer: PolicyTokenizer) -> None:
    class Chatty(Broken):
        def step(self, text: str, token_ids: Sequence[int]) -> Observation:  # type: ignore[override]
            return Observation(messages=({"role": "tool", "content": "85"},))

    t = play(tokenizer, environment=lambda: Chatty(""))
    assert (t.status, t.reason) == (TrajectoryStatus.ABORTED, "template")


def test_a_model_directory_is_read_with_errors_that_say_what_is_missing(tmp_path: Path) -> None:
    from headrace.schemas.errors import ConfigError

    with pytest.raises(ConfigError, match="has no tokenizer: none of"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"policy\.model is not set"):
        load_tokenizer(None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)


class Blocking:
    """Blocks in one of its calls until it is released; notes the thread of each call."""

    def __init__(self, at: str) -> None:
        self.at, self.release, self.closed = at, threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self._pass("init")

    def _pass(self, name: str) -> None:
        self.threads.append(threading.current_thread())
        if name == self.at:
            self.release.wait(30)

    def start(self, task: Task) -> None:
        self._pass("start")

    def step(self, text: str, token_ids: Sequence[int]) -> None:
        self._pass("step")

    def close(self) -> None:
        self._pass("close")
        self.closed.set()


@pytest.mark.parametrize(("at", "tokens"), [("start", 6), ("step", 13)])
def test_a_sync_environment_that_blocks_stops_only_its_own_rollout(
    tokenizer: PolicyTokenizer, at: str, tokens: int
) -> None:
    environment = Blocking("")
    environment.at = at

    async def run() -> tuple[Trajectory, int]:
        episode = Episode(
            group(environment_seconds=0.3),
            "g.0",
            environment=lambda: environment,
            tokenizer=tokenizer,
            generate=Engine(),
            now_ms=lambda: 0,
        )
        task = asyncio.create_task(episode.run())
        turns = 0
        while not task.done():
            await asyncio.sleep(0.01)
            turns += 1
        return await task, turns

    t, turns = asyncio.run(run())
    assert (t.status, t.reason, len(t.token_ids)) == (TrajectoryStatus.ABORTED, "environment_timeout", tokens)
    assert f"{at} of the environment took over 0.3 s" in json.loads(t.metadata or "")["detail"]
    assert turns > 5
    assert not environment.closed.is_set()
    environment.release.set()
    assert environment.closed.wait(10)  # once the call that hung has returned


def test_all_sync_calls_of_an_environment_run_in_one_daemon_thread(tokenizer: PolicyTokenizer) -> None:
    made: list[Blocking] = []

    def make() -> Blocking:
        made.append(Blocking(""))
        return made[0]

    assert play(tokenizer, environment=make).status is TrajectoryStatus.COMPLETED
    (thread,) = set(made[0].threads)
    assert len(made[0].threads) == 4
    assert thread.daemon and thread is not threading.main_thread()
    thread.join(10)
    assert not thread.is_alive()


def test_a_built_in_environment_starts_no_thread(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert play(tokenizer).status is TrajectoryStatus.COMPLETED
    assert play(tokenizer, environment=functools.partial(Calculator)).status is TrajectoryStatus.COMPLETED


def test_an_async_environment_has_the_same_limit_and_stays_on_the_loop(tokenizer: PolicyTokenizer) -> None:
    class Slow:
        def __init__(self) -> None:
            asyncio.get_running_loop()

        async def start(self, task: Task) -> None:
            assert threading.current_thread() is threading.main_thread()

        async def step(self, text: str, token_ids: Sequence[int]) -> None:
            await asyncio.sleep(30)

    t = play(tokenizer, environment=Slow, environment_seconds=0.1)
    assert (t.status, t.reason) == (TrajectoryStatus.ABORTED, "environment_timeout")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TimeoutError("the sandbox"), "TimeoutError: the sandbox"),
        (StopIteration(), "StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_what_a_sync_environment_raises_is_told(
    tokenizer: PolicyTokenizer, error: BaseException, told: str
) -> None:
    class Raising(Broken):
        def step(self, text: str, token_ids: Sequence[int]) -> None:
            raise error

    t = play(tokenizer, environment=lambda: Raising(""))
    assert (t.status, t.reason) == (TrajectoryStatus.ABORTED, "environment")
    assert told in json.loads(t.metadata or "")["detail"]


def test_calls_that_never_return_are_bounded(
    tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_STUCK", 1)
    monkeypatch.setattr(calls, "_left", set())
    stuck = Blocking("")
    stuck.at = "step"
    t = play(tokenizer, environment=lambda: stuck, environment_seconds=1.0)
    assert t.reason == "environment_timeout"
    t = play(tokenizer, environment=lambda: Blocking(""))
    assert t.reason == "environment" and "never returned" in json.loads(t.metadata or "")["detail"]
    stuck.release.set()
    stuck.threads[1].join(10)
    assert play(tokenizer, environment=lambda: Blocking("")).status is TrajectoryStatus.COMPLETED
