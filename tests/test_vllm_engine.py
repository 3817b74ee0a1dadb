"""A real vLLM follows weights: its numbers against transformers, its spans, and what it does when an update fails."""

import asyncio
import dataclasses
import os
import re
import threading

import numpy as np
import pytest
import torch
from engine_kit import anchor, delta, perturbed
from vllm_kit import VOCAB, attached, model_with, on_old_keys, recomputed, saved, started, versions
from weights_kit import Setup, Trainer

from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.vllm.engine import VllmEngine
from headrace.schemas.config import Config
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import ConfigError, EngineError, EnginePoisonedError, WeightUpdateError
from headrace.schemas.update import TensorPatch
from headrace.schemas.weight_hash import set_hash

TOLERANCE = 2e-5
KINDS = {k: k for k in ("dense", "tied", "moe", "gpt2")} | {"two ranks": "moe", "attached": "dense"}


def real(test):
    """Needs vLLM; a start takes minutes where other work is going on."""
    return pytest.mark.vllm(pytest.mark.timeout(900)(test))


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    """What is running: four models in our process, one cut between two ranks, one in a server of its own.

    vLLM transposes most of GPT-2: its weights go through the model's own loader.
    """
    return request.param


@pytest.fixture(scope="module")
def running(kind, tmp_path_factory):
    directory = saved(KINDS[kind], tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
        )  # for faults that the tests plant in the workers
        made = attached if kind == "attached" else started
        kept = made(directory, **({"ranks": 2} if kind == "two ranks" else {}))
        yield kept
        kept.end()


@pytest.fixture
def make(running):
    """Makes engines and closes them."""
    engines = []

    def make(**settings):
        engines.append(VllmEngine(running, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def swap(engine, update, *, staged: bool = True):
    """As the subscriber does it."""
    if staged:
        engine.stage(update)
    with engine.paused():
        before = engine.generated_tokens
        engine.apply(update)
        engine.verify(update)
        assert engine.weights_hash() == update.weights_hash
        assert engine.generated_tokens == before


def ask(i: int = 0, *, n: int = 5, max_tokens: int = 40, **more) -> GenerateRequest:
    prompt = tuple((3 * i + j * j + 1) % VOCAB for j in range(n))
    return GenerateRequest(request_id=f"r{i}", token_ids=prompt, max_tokens=max_tokens, **more)


async def sampled(engine, tokens: int) -> None:
    async with asyncio.timeout(120):
        while engine.generated_tokens < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def close_to(result, expected) -> None:
    assert np.abs(np.array(result.logprobs) - expected).max() < TOLERANCE


@real
@pytest.mark.parametrize("kv_policy", ["stale", "recompute"])
def test_six_requests_live_through_ten_updates_and_every_number_is_right(kind, make, kv_policy):
    weights = versions(KINDS[kind], 11)
    models = [model_with(KINDS[kind], w) for w in weights]
    engine = make(kv_policy=kv_policy)
    swap(engine, anchor(weights[0], 0))
    # Longer than two blocks of the cache, so that its keys and values are cached and asked for again.
    shared = ask(40, n=80, max_tokens=8)

    async def main():
        started = engine.generated_tokens
        tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=600))) for i in range(6)]
        repeats = []
        for version in range(1, 11):
            await sampled(engine, started + 6 * 40 * version)
            await asyncio.to_thread(swap, engine, delta(weights[version - 1], weights[version], version))
            repeats.append(await engine.generate(shared))
        return await asyncio.gather(*tasks), repeats

    results, repeats = asyncio.run(main())
    for version, result in enumerate(repeats, start=1):
        assert {s.version for s in result.version_spans} == {version}
        close_to(result, recomputed(models[version], shared.token_ids, result.token_ids))
        old = recomputed(models[version - 1], shared.token_ids, result.token_ids)
        assert np.abs(np.array(result.logprobs) - old).max() > 1e-3
    for i, result in enumerate(results):
        spans = result.version_spans
        assert len(result.token_ids) == 600 and [s.version for s in spans] == list(range(11))
        prompt, ends = ask(i).token_ids, [s.end for s in spans]
        if kv_policy == "stale":
            close_to(result, on_old_keys(models, ends, prompt, result.token_ids))
        else:
            full = [
                recomputed(m, prompt, result.token_ids)[s.start : s.end]
                for m, s in zip(models, spans, strict=True)
            ]
            close_to(result, np.concatenate(full))


@real
def test_a_changed_q_alone_and_either_name_of_a_tied_tensor(kind, make):
    weights = versions(KINDS[kind], 1)[0]
    engine = make()
    swap(engine, anchor(weights, 0))
    changed = perturbed(weights, 5)
    new = weights | {n: changed[n] for n in weights if n.endswith(("q_proj.weight", "c_attn.weight"))}
    swap(engine, delta(weights, new, 1))
    close_to_now(engine, kind, new)
    if kind == "tied":
        for version, names in enumerate(
            (["lm_head"], ["model.embed_tokens"], ["lm_head", "model.embed_tokens"]), start=2
        ):
            base, new = (
                new,
                new | {"model.embed_tokens.weight": perturbed(new, version)["model.embed_tokens.weight"]},
            )
            update = delta(base, new, version)
            (only,) = update.patches
            listed = tuple(dataclasses.replace(only, name=f"{name}.weight") for name in names)
            swap(engine, dataclasses.replace(update, patches=listed))
            close_to_now(engine, kind, new)


def close_to_now(engine, kind, weights) -> None:
    result = asyncio.run(engine.generate(ask(7)))
    close_to(result, recomputed(model_with(KINDS[kind], weights), ask(7).token_ids, result.token_ids))


@real
def test_an_update_that_does_not_fit_is_refused_before_the_pause_and_names_what_is_near(kind, make):
    weights = versions(KINDS[kind], 2)
    engine = make()
    swap(engine, anchor(weights[0], 0))
    good = delta(weights[0], weights[1], 1)
    name = next(n for n in weights[0] if n.endswith(("q_proj.weight", "c_attn.weight")))
    wrong = TensorPatch(
        name=name.replace("attn", "atnt"),
        shape=weights[0][name].shape,
        indices=np.array([1]),
        bits=np.array([7], dtype=np.uint16),
    )
    with pytest.raises(WeightUpdateError, match=re.escape(name)) as e:
        engine.stage(dataclasses.replace(good, patches=(*good.patches, wrong)))
    assert e.value.reason == "unknown_tensor"
    with engine.paused():
        assert engine.weights_hash() == set_hash(weights[0])
    swap(engine, good, staged=False)
    close_to_now(engine, kind, weights[1])


@real
def test_a_write_that_fails_half_way_poisons_and_the_anchor_heals_it(kind, make, running):
    if kind == "attached":
        pytest.skip("no fault can be planted in a server from outside")
    trainer = Trainer(anchor_every=3)
    trainer.weights = versions(KINDS[kind], 1)
    trainer.records = [trainer._record(0, None, None)]
    for seed in (1, 2):
        trainer.weights.append(perturbed(trainer.weights[-1], seed))
        trainer.records.append(trainer._record(seed, *trainer.weights[-2:]))
    engine = make()
    s = Setup(trainer, engine)
    s.see(*trainer.records[:2])
    assert engine.version == 1
    running.everywhere(break_the_next_write)

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=900)))
        await sampled(engine, engine.generated_tokens + 5)
        s.subscriber.see(trainer.records[2:])
        await asyncio.to_thread(s.subscriber.follow)
        with pytest.raises(EnginePoisonedError):
            await task
        with pytest.raises(EnginePoisonedError):
            await engine.generate(ask())

    asyncio.run(main())
    assert s.last.state is EngineState.POISONED and s.last.weights_hash is None
    assert "was not written" in s.last.reason
    with engine.paused(), pytest.raises(WeightUpdateError, match="anchor must come first"):
        engine.apply(delta(trainer.weights[0], trainer.weights[1], 2))
    s.clock.now += 60
    s.settle()
    assert s.last.state is EngineState.IDLE and s.last.version == engine.version == 2
    with engine.paused():
        assert engine.weights_hash() == trainer.hash(2)
    close_to_now(engine, kind, trainer.weights[2])


def break_the_next_write(worker) -> None:
    """Runs in a worker: the next update ends after its first tensor."""
    shard = worker.weight_transfer_engine.shard
    write, count = type(shard)._write, []

    def failing(self, step):
        count.append(step)
        if len(count) > 1:
            type(self)._write = write
            raise RuntimeError("the device is gone")
        write(self, step)

    type(shard)._write = failing


@real
@pytest.mark.parametrize("mode", ["abort", "drain"])
def test_requests_in_flight_end_early_or_are_waited_for(kind, make, mode):
    weights = versions(KINDS[kind], 2)
    models = [model_with(KINDS[kind], w) for w in weights]
    engine = make(pause_mode=mode)
    swap(engine, anchor(weights[0], 0))

    async def main():
        tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=150))) for i in range(6)]
        await sampled(engine, engine.generated_tokens + 60)
        await asyncio.to_thread(swap, engine, delta(weights[0], weights[1], 1))
        return await asyncio.gather(*tasks), await engine.generate(ask(9))

    results, after = asyncio.run(main())
    for i, result in enumerate(results):
        assert [s.version for s in result.version_spans] == [0]
        close_to(result, recomputed(models[0], ask(i).token_ids, result.token_ids))
        if mode == "abort":
            assert result.finish_reason == "abort" and len(result.token_ids) < 150
        else:
            assert result.finish_reason == "length" and len(result.token_ids) == 150
    assert [s.version for s in after.version_spans] == [1]
    close_to(after, recomputed(models[1], ask(9).token_ids, after.token_ids))


@real
def test_logprobs_are_of_the_distribution_that_was_drawn_from(make, kind):
    weights = versions(KINDS[kind], 1)[0]
    engine = make()
    assert engine.logprobs_mode == "processed"
    swap(engine, anchor(weights, 0))
    request = ask(3, temperature=0.7)
    result = asyncio.run(engine.generate(request))
    model = model_with(KINDS[kind], weights)
    close_to(result, recomputed(model, request.token_ids, result.token_ids, temperature=0.7))


@real
def test_a_vllm_that_keeps_its_weights_otherwise_is_refused_at_the_start(monkeypatch):
    pytest.importorskip("vllm", reason="no vLLM in this environment")
    from vllm.model_executor.layers import utils

    from headrace.producers.engines.vllm import cpu

    with pytest.raises(RuntimeError, match=r"q is empty.*deploy/vllm/install"):
        cpu.check_unpacked(torch.nn.ParameterDict({"q": torch.nn.Parameter(torch.empty(0))}))
    monkeypatch.delattr(utils, "dispatch_cpu_unquantized_gemm")
    with pytest.raises(RuntimeError, match=r"dispatch_cpu_unquantized_gemm.*deploy/vllm/install"):
        cpu.keep_unpacked()


@real
def test_a_worker_that_dies_ends_what_is_in_flight_and_the_engine(kind, make, running):
    """The last one: nothing runs on this vLLM after it."""
    if kind != "dense":
        pytest.skip("once is enough")
    weights = versions(KINDS[kind], 2)
    engine = make()
    swap(engine, anchor(weights[0], 0))
    engine.stage(delta(weights[0], weights[1], 1))

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=900)))
        await sampled(engine, engine.generated_tokens + 5)
        running.everywhere(die_soon)
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.generate(ask())

    asyncio.run(main())
    with pytest.raises(EngineError), engine.paused():
        pass
    assert not engine.alive
    engine.close()


def die_soon(worker) -> None:
    """Runs in a worker."""
    threading.Timer(0.2, os._exit, (1,)).start()


def test_without_vllm_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    from headrace.producers.engines.role import make_engine

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = Config.model_validate({"engine": {"kind": "vllm"}, "policy": {"model": str(tmp_path)}})
    with pytest.raises(ConfigError, match="deploy/vllm/install"):
        make_engine(config, "engine-0")


def test_a_server_that_is_not_there_or_was_started_otherwise_is_named(tmp_path):
    from headrace.producers.engines.role import make_engine

    config = Config.model_validate({"engine": {"kind": "vllm", "url": "http://127.0.0.1:9"}})
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 .* start it with: .*worker-extension-cls"):
        make_engine(config, "engine-0")
