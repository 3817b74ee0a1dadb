"""What every engine promises, on each engine."""

import asyncio
import threading

import numpy as np
import pytest
from engine_kit import VOCAB, anchor, bits_of, delta, perturbed, tiny_model
from sglang_stub import SglangStub, engine_on

from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.producers.engines.transformers import TransformersEngine
from headrace.schemas.errors import EngineError, EnginePoisonedError, WeightUpdateError
from headrace.schemas.update import TensorPatch, WeightUpdate
from headrace.schemas.weight_hash import set_hash

WEIGHTS = [bits_of(tiny_model())]
for _seed in (1, 2):
    WEIGHTS.append(perturbed(WEIGHTS[-1], _seed))


@pytest.fixture(scope="module")
def sglang_stubs():
    """Pause mode -> a server for it; `restart` makes it as new."""
    stubs = {
        mode: SglangStub(
            bits_of(tiny_model(5)), vocab_size=VOCAB, radix=mode == "in_place", step_seconds=0.003
        )
        for mode in ("in_place", "retract")
    }
    yield {mode: stub.start() for mode, stub in stubs.items()}
    for stub in stubs.values():
        stub.stop()


@pytest.fixture(params=["scripted", "stale", "recompute", "sglang in_place", "sglang retract"])
def empty_engine(request, tmp_path, sglang_stubs):
    """Each engine, before its first weights."""
    if request.param.startswith("sglang"):
        mode = request.param.split()[1]
        sglang_stubs[mode].restart()
        engine = engine_on(sglang_stubs[mode], tmp_path / "checkpoint", pause_mode=mode)
        yield engine
        engine.close()
        return
    if request.param == "scripted":
        engine = ScriptedEngine(WEIGHTS[0], vocab_size=VOCAB)
    else:
        engine = TransformersEngine(
            tiny_model(5), kv_policy=request.param, max_requests=64, cache_tokens=32768, seed=1
        )
    yield engine
    engine.close()


@pytest.fixture
def engine(empty_engine):
    """Each engine, on version 0."""
    with empty_engine.paused():
        empty_engine.apply(anchor(WEIGHTS[0], 0))
    return empty_engine


def ask(i: int = 0, *, n: int = 6, max_tokens: int = 12, **more) -> GenerateRequest:
    prompt = tuple((3 * i + j * j + 1) % VOCAB for j in range(n))
    return GenerateRequest(request_id=f"r{i}", token_ids=prompt, max_tokens=max_tokens, **more)


def check_shape(result, request) -> None:
    assert result.request_id == request.request_id
    assert len(result.token_ids) == len(result.logprobs) > 0
    assert all(np.isfinite(p) and p <= 0.0 for p in result.logprobs)
    assert all(0 <= t < VOCAB for t in result.token_ids)
    at = 0
    for span in result.version_spans:
        assert span.start == at < span.end
        at = span.end
    assert at == len(result.token_ids)


async def in_flight(engine, tokens: int = 1):
    """Waits until some request has sampled; there is no event for it across engines."""
    async with asyncio.timeout(30):
        while engine.generated_tokens < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_a_turn_ends_at_its_token_limit(engine):
    request = ask(max_tokens=12)
    result = asyncio.run(engine.generate(request))
    check_shape(result, request)
    assert result.finish_reason == "length" and len(result.token_ids) == 12
    assert {s.version for s in result.version_spans} == {0}
    assert engine.generated_tokens == 12 and engine.running == 0


def test_a_turn_ends_at_any_of_its_stop_tokens_which_is_part_of_it(engine):
    stops = tuple(range(0, VOCAB, 3))

    async def main():
        return await asyncio.gather(
            *(engine.generate(ask(i, max_tokens=200, stop_token_ids=stops)) for i in range(20))
        )

    for i, result in enumerate(asyncio.run(main())):
        check_shape(result, ask(i))
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] in stops and not set(result.token_ids[:-1]) & set(stops)


def test_nothing_is_served_before_the_first_weights(empty_engine):
    assert empty_engine.version == -1
    with pytest.raises(EngineError, match="no weights"):
        asyncio.run(empty_engine.generate(ask()))


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(request_id="r", token_ids=(), max_tokens=3),
        GenerateRequest(request_id="r", token_ids=(1, VOCAB), max_tokens=3),
        GenerateRequest(request_id="r", token_ids=(-1,), max_tokens=3),
        GenerateRequest(request_id="r", token_ids=(1,), max_tokens=0),
        GenerateRequest(request_id="r", token_ids=(1,), max_tokens=3, temperature=0.0),
    ],
)
def test_requests_that_make_no_sense_are_refused_and_cost_nothing(engine, request_):
    with pytest.raises(EngineError):
        asyncio.run(engine.generate(request_))
    check_shape(asyncio.run(engine.generate(ask())), ask())


def test_ids_of_callers_may_repeat(engine):
    async def main():
        return await asyncio.gather(*(engine.generate(ask(0, max_tokens=5)) for _ in range(4)))

    assert [len(r.token_ids) for r in asyncio.run(main())] == [5] * 4


def test_cancelling_the_task_aborts_the_request(engine):
    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=900)))
        await in_flight(engine)
        assert engine.running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.running == 0
        return await engine.generate(ask(1))

    check_shape(asyncio.run(main()), ask(1))


def test_no_token_is_sampled_in_a_pause_and_requests_survive_it(engine):
    async def main():
        tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=150))) for i in range(8)]
        await in_flight(engine)
        for _ in range(3):
            await asyncio.to_thread(held)
        return await asyncio.gather(*tasks)

    def held():
        with engine.paused():
            before = engine.generated_tokens
            assert not threading.Event().wait(0.05)  # time in which a running loop would sample
            assert engine.generated_tokens == before

    assert [len(r.token_ids) for r in asyncio.run(main())] == [150] * 8


def test_32_requests_in_flight_survive_two_updates_and_hashes_agree_after_each(engine):
    async def main():
        tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=200 + i))) for i in range(32)]
        for version in (1, 2):
            await in_flight(engine, 1500 * version)
            # Not in a thread: a thread that starts late would find the requests finished.
            update(version)
        return await asyncio.gather(*tasks)

    def update(version):
        change = delta(WEIGHTS[version - 1], WEIGHTS[version], version)
        with engine.paused():
            engine.apply(change)
            assert engine.weights_hash() == set_hash(WEIGHTS[version]) == change.weights_hash
        assert engine.version == version

    results = asyncio.run(main())
    for i, result in enumerate(results):
        check_shape(result, ask(i))
        assert len(result.token_ids) == 200 + i
        assert [s.version for s in result.version_spans] == [0, 1, 2]


def test_several_updates_in_one_pause_make_one_boundary(engine):
    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=200)))
        await in_flight(engine, 10)
        update()
        return await task

    def update():
        with engine.paused():
            for version in (1, 2):
                engine.apply(delta(WEIGHTS[version - 1], WEIGHTS[version], version))
            assert engine.weights_hash() == set_hash(WEIGHTS[2])

    assert [s.version for s in asyncio.run(main()).version_spans] == [0, 2]


def test_a_version_without_changes_needs_no_pause(engine):
    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=300)))
        await in_flight(engine, 10)
        engine.advance(1)
        return await task

    result = asyncio.run(main())
    check_shape(result, ask())
    assert [s.version for s in result.version_spans] == [0, 1]
    assert engine.version == 1
    with engine.paused():
        assert engine.weights_hash() == set_hash(WEIGHTS[0])
        engine.apply(delta(WEIGHTS[0], WEIGHTS[1], 2))
    assert engine.version == 2


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("base_version", {"base_version": 7}),
        ("unknown_tensor", {"name": "model.norm.wieght"}),
        ("shape", {"shape": (31,)}),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(engine, reason, change):
    good = TensorPatch(
        name="model.norm.weight", shape=(32,), indices=np.array([1]), bits=np.array([7], dtype=np.uint16)
    )
    fields = {"name": good.name, "shape": good.shape, "indices": good.indices, "bits": good.bits}
    bad = TensorPatch(**{**fields, **{k: v for k, v in change.items() if k != "base_version"}})
    update = WeightUpdate(
        version=1, base_version=change.get("base_version", 0), patches=(good, bad), weights_hash=0
    )
    with engine.paused():
        with pytest.raises(WeightUpdateError) as e:
            engine.apply(update)
        assert e.value.reason == reason
        assert engine.weights_hash() == set_hash(WEIGHTS[0])
    assert engine.version == 0
    check_shape(asyncio.run(engine.generate(ask())), ask())


def test_a_poisoned_engine_serves_nothing_until_it_has_an_anchor(engine):
    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=900)))
        await in_flight(engine)
        poison()
        with pytest.raises(EnginePoisonedError):
            await task
        with pytest.raises(EnginePoisonedError):
            await engine.generate(ask())

    def poison():
        with engine.paused():
            engine.poison()

    asyncio.run(main())
    with engine.paused():
        engine.apply(delta(WEIGHTS[0], WEIGHTS[1], 1))
    with pytest.raises(EnginePoisonedError):
        asyncio.run(engine.generate(ask()))
    with engine.paused():
        engine.apply(anchor(WEIGHTS[2], 2))
        assert engine.weights_hash() == set_hash(WEIGHTS[2])
    result = asyncio.run(engine.generate(ask()))
    assert {s.version for s in result.version_spans} == {2}


def test_closing_fails_what_is_in_flight_and_may_be_repeated(engine):
    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=900)))
        await in_flight(engine)
        engine.close()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.generate(ask())

    assert engine.alive
    asyncio.run(main())
    engine.close()
    assert not engine.alive
