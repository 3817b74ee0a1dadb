"""Small parts of the rollout worker: task passes, engine choice and retries, the clock check."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_parts import ScriptedClient, ids_of

from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.rollout.clock import MAX_SKEW_MS, PROBE_EVERY_MS, ClockCheck, clock_skew_ms
from headrace.producers.rollout.engine_pool import EnginePool, RetryRule
from headrace.producers.rollout.tasks import TaskPool
from headrace.schemas.engine import EngineState, EngineStatus
from headrace.schemas.errors import EngineError, EnginePoisonedError
from headrace.schemas.task import Task
from headrace.schemas.trajectory import Split

REQUEST = GenerateRequest(request_id="r", token_ids=ids_of("1+1="), max_tokens=8)
QUICK = RetryRule(attempts=3, first_pause=0.001, longest_pause=0.001)


def task(name: str, policy: str = "p", split: Split = Split.TRAIN) -> Task:
    return Task(task_id=name, policy_id=policy, prompt=name, split=split)


def names(pool: TaskPool, n: int) -> list[str]:
    return [t.task_id for t in (pool.next() for _ in range(n)) if t is not None]


def test_each_pass_hands_out_every_task_once_in_another_order() -> None:
    pool = TaskPool("p", "0")
    for i in range(20):
        pool.put(task(f"t{i}"))
    first, second = names(pool, 20), names(pool, 20)
    assert sorted(first) == sorted(second) == sorted(f"t{i}" for i in range(20))
    assert first != second
    again = TaskPool("p", "0")
    for i in reversed(range(20)):
        again.put(task(f"t{i}"))
    assert names(again, 40) == first + second


def test_eval_tasks_and_other_policies_are_never_handed_out() -> None:
    pool = TaskPool("p", "0")
    pool.put(task("e", split=Split.EVAL))
    pool.put(task("o", policy="other"))
    assert pool.next() is None
    assert [t.task_id for t in pool.eval_tasks] == ["e"]


def test_a_task_published_again_replaces_the_earlier_and_a_tombstone_removes_it() -> None:
    pool = TaskPool("p", "0")
    pool.put(task("a"))
    pool.put(Task(task_id="a", policy_id="p", prompt="new"))
    found = pool.next()
    assert found is not None
    assert found.prompt == "new"
    pool.put(task("a", split=Split.EVAL))
    assert pool.next() is None
    pool.put(task("a"))
    pool.remove("a")
    assert pool.next() is None


def status(
    name: str, *, state: EngineState = EngineState.IDLE, version: int = 0, url: str | None = "u"
) -> EngineStatus:
    return EngineStatus(
        engine_id=name, policy_id="p", state=state, version=version, url=url and f"{url}/{name}"
    )


class Clients(dict[str, ScriptedClient]):
    """One client per url, made on demand."""

    def __call__(self, url: str) -> ScriptedClient:
        return self.setdefault(url, ScriptedClient())


def test_only_engines_that_can_serve_are_asked() -> None:
    async def run() -> None:
        pool = EnginePool("p", Clients(), rule=QUICK)
        for unable in (
            status("a", state=EngineState.POISONED),
            status("b", state=EngineState.STOPPED),
            status("c", version=-1),
            status("d", url=None),
            EngineStatus(engine_id="e", policy_id="other", state=EngineState.IDLE, version=0, url="u/e"),
        ):
            pool.update(unable)
        assert not pool.ready
        with pytest.raises(EngineError, match="no engine"):
            await pool.generate(REQUEST)
        pool.update(status("c", state=EngineState.APPLYING, version=1))
        assert (await pool.generate(REQUEST))[0] == "c"
        pool.remove("c")
        assert not pool.ready

    asyncio.run(run())


def test_a_turn_goes_to_the_engine_with_the_prefix_and_else_to_the_least_loaded() -> None:
    async def run() -> None:
        pool = EnginePool("p", Clients(), rule=QUICK)
        pool.update(status("a"))
        pool.update(status("b"))
        asked = await asyncio.gather(*(pool.generate(REQUEST) for _ in range(10)))
        assert sorted(e for e, _ in asked) == ["a"] * 5 + ["b"] * 5
        assert [(await pool.generate(REQUEST, "b"))[0] for _ in range(3)] == ["b"] * 3

    asyncio.run(run())


def test_a_failed_turn_is_tried_on_another_engine_and_the_failed_one_is_left_alone() -> None:
    async def run() -> None:
        clients, now = Clients(), 0.0
        pool = EnginePool("p", clients, rule=QUICK, clock=lambda: now)
        pool.update(status("a"))
        clients["u/a"].breaks_after = 0
        pool.update(status("b"))
        assert [(await pool.generate(REQUEST, "a"))[0] for _ in range(3)] == ["b"] * 3
        assert clients["u/a"].calls == 1
        assert not pool.failing

    asyncio.run(run())


def test_retries_are_bounded_and_the_last_error_is_told() -> None:
    async def run() -> None:
        clients, now = Clients(), [0.0]

        def clock() -> float:
            now[0] += 1.0
            return now[0]

        pool = EnginePool("p", clients, rule=QUICK, clock=clock)
        pool.update(status("a"))
        clients["u/a"].breaks_after = 0
        with pytest.raises(EngineError, match="connection refused"):
            await pool.generate(REQUEST)
        assert clients["u/a"].calls == 3
        assert pool.failing

    asyncio.run(run())


def test_a_poisoned_engine_is_left_alone_until_it_reports_again() -> None:
    class Poisoned(ScriptedClient):
        async def generate(self, request: GenerateRequest):  # type: ignore[no-untyped-def]
            raise EnginePoisonedError("torn")

    async def run() -> None:
        pool = EnginePool("p", lambda url: Poisoned(), rule=RetryRule(attempts=1))
        pool.update(status("a"))
        with pytest.raises(EnginePoisonedError):
            await pool.generate(REQUEST)
        assert not pool.ready
        pool.update(status("a", version=3))
        assert pool.ready

    asyncio.run(run())


def test_an_engine_that_comes_back_elsewhere_gets_a_new_client() -> None:
    async def run() -> None:
        clients = Clients()
        pool = EnginePool("p", clients, rule=QUICK)
        pool.update(status("a", url="old"))
        pool.update(status("a", url="new"))
        await pool.generate(REQUEST)
        assert clients["new/a"].calls == 1
        assert clients["old/a"].calls == 0

    asyncio.run(run())


def test_a_waiting_turn_starts_when_an_engine_reports() -> None:
    async def run() -> str:
        pool = EnginePool("p", Clients(), rule=RetryRule(attempts=2, first_pause=60.0, longest_pause=60.0))
        waiting = asyncio.create_task(pool.generate(REQUEST))
        await asyncio.sleep(0)
        pool.update(status("a"))
        return (await asyncio.wait_for(waiting, 10))[0]

    assert asyncio.run(run()) == "a"


@given(
    sent=st.integers(0, 10**6),
    flight=st.integers(0, 10**4),
    share=st.floats(0, 1),
    skew=st.integers(-(10**5), 10**5),
)
def test_the_measured_skew_is_never_larger_than_the_true_one(
    sent: int, flight: int, share: float, skew: int
) -> None:
    append = sent + int(flight * share) - skew
    measured = clock_skew_ms(sent_ms=sent, acked_ms=sent + flight, append_ms=append)
    assert abs(measured) <= abs(skew)
    assert measured * skew >= 0
    assert abs(skew - measured) <= flight + 1


def test_no_group_is_opened_while_the_clock_is_wrong_but_for_a_corrected_probe() -> None:
    clock = ClockCheck()
    assert clock.may_open(0, running=0)
    assert not clock.may_open(0, running=1), "one group at a time until the clock is known"
    assert not clock.acknowledged(sent_ms=100, acked_ms=110, append_ms=105)
    assert clock.may_open(0, running=99)
    off = 2 * MAX_SKEW_MS
    assert clock.acknowledged(sent_ms=1000 + off, acked_ms=1000 + off, append_ms=1000)
    assert clock.wrong
    assert not clock.may_open(1000 + off, running=0)
    probe = 1000 + off + PROBE_EVERY_MS
    assert clock.may_open(probe, running=0)
    assert not clock.may_open(probe + 1, running=0)
    assert clock.deadline_ms(probe, 5000) == probe - off + 5000
    assert clock.acknowledged(sent_ms=probe, acked_ms=probe + 5, append_ms=probe + 3)
    assert not clock.wrong
