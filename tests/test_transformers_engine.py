"""The embedded engine's numbers: logprobs and version spans against plain forward passes of transformers."""

import asyncio

import numpy as np
import pytest
import torch
from engine_kit import (
    VOCAB,
    anchor,
    bits_of,
    continued,
    delta,
    model_with,
    perturbed,
    picked,
    reached,
    recomputed,
    tiny_model,
)

from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.transformers import TransformersEngine, load_model
from headrace.schemas.errors import ConfigError, EngineError, WeightUpdateError
from headrace.schemas.update import apply_update
from headrace.schemas.weight_hash import set_hash

TOLERANCE = 1e-4
WEIGHTS = [bits_of(tiny_model())]
for _seed in (1, 2):
    WEIGHTS.append(perturbed(WEIGHTS[-1], _seed))


@pytest.fixture
def start():
    """Makes engines on version 0 and closes them."""
    engines = []

    def make(model=None, **settings):
        settings = {"max_requests": 64, "cache_tokens": 32768, "seed": 3, **settings}
        engines.append(
            TransformersEngine(model if model is not None else tiny_model(), version=0, **settings)
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(i: int, n: int = 8) -> tuple[int, ...]:
    return tuple((5 * i + j * j + 2) % VOCAB for j in range(n))


def ask(i: int, n: int = 8, **more) -> GenerateRequest:
    return GenerateRequest(request_id=str(i), token_ids=prompt(i, n), **{"max_tokens": 30, **more})


async def across_two_updates(engine, request, *, tokens=(60, 130)):
    """One long turn; version 1 comes after tokens[0] tokens, version 2 after tokens[1] (or a few more)."""
    replica = {name: bits.copy() for name, bits in WEIGHTS[0].items()}

    def update(version, seen):
        assert seen.wait(60)
        change = delta(replica, WEIGHTS[version], version)
        with engine.paused():
            engine.apply(change)
            live = engine.weights_hash()
        apply_update(replica, change)
        assert live == set_hash(WEIGHTS[version]) == set_hash(replica)

    task = asyncio.create_task(engine.generate(request))
    for version, count in enumerate(tokens, start=1):
        await asyncio.to_thread(update, version, reached(engine, count))
    return await task


def check_three_spans(result, tokens=(60, 130)) -> list[int]:
    spans = result.version_spans
    assert [s.version for s in spans] == [0, 1, 2]
    assert spans[0].start == 0 and spans[2].end == len(result.token_ids)
    assert spans[0].end == spans[1].start >= tokens[0]
    assert spans[1].end == spans[2].start >= tokens[1]
    return [s.end for s in spans]


def test_recompute_logprobs_under_each_span_are_those_of_that_versions_weights(start):
    engine = start(kv_policy="recompute")
    result = asyncio.run(across_two_updates(engine, ask(0, max_tokens=220)))
    assert len(result.token_ids) == 220
    check_three_spans(result)
    for span in result.version_spans:
        expected = recomputed(model_with(WEIGHTS[span.version]), prompt(0), result.token_ids)
        under = slice(span.start, span.end)
        assert np.abs(np.array(result.logprobs[under]) - expected[under]).max() < TOLERANCE
        other = recomputed(model_with(WEIGHTS[(span.version + 1) % 3]), prompt(0), result.token_ids)
        assert np.abs(np.array(result.logprobs[under]) - other[under]).max() > 0.1


def test_stale_logprobs_are_those_of_the_new_weights_on_the_old_keys_and_values(start):
    engine = start(kv_policy="stale")
    result = asyncio.run(across_two_updates(engine, ask(0, max_tokens=220)))
    first, second, _ = check_three_spans(result)
    models = [model_with(w) for w in WEIGHTS]
    logprobs = np.array(result.logprobs)
    assert np.abs(logprobs - recomputed(models[0], prompt(0), result.token_ids))[:first].max() < TOLERANCE
    tokens = result.token_ids[:second]
    hybrid = continued(models[0], models[1], prompt(0), tokens, first)
    assert np.abs(logprobs[first:second] - hybrid).max() < TOLERANCE
    full = recomputed(models[1], prompt(0), tokens)[first:]
    assert np.abs(logprobs[first:second] - full).max() > 100 * TOLERANCE


@pytest.mark.parametrize("policy", ["stale", "recompute"])
def test_requests_of_all_lengths_at_once_have_the_logprobs_of_each_alone(start, policy):
    engine = start(kv_policy=policy, max_batch_tokens=64)
    requests = [ask(i, n=1 + (i * 7) % 90, max_tokens=1 + (i * 5) % 40) for i in range(48)]

    async def main():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    model = model_with(WEIGHTS[0])
    for request, result in zip(requests, asyncio.run(main()), strict=True):
        assert len(result.token_ids) == request.max_tokens
        expected = recomputed(model, request.token_ids, result.token_ids)
        assert np.abs(np.array(result.logprobs) - expected).max() < TOLERANCE


def test_many_requests_across_updates_stay_exact_under_recompute(start):
    engine = start(kv_policy="recompute")
    requests = [ask(i, n=2 + i, max_tokens=120) for i in range(16)]

    async def main():
        tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
        await asyncio.to_thread(update, reached(engine, 40))
        return await asyncio.gather(*tasks)

    def update(seen):
        assert seen.wait(60)
        with engine.paused():
            engine.apply(delta(WEIGHTS[0], WEIGHTS[1], 1))

    models = [model_with(w) for w in WEIGHTS[:2]]
    for request, result in zip(requests, asyncio.run(main()), strict=True):
        assert len(result.token_ids) == 120 and len(result.version_spans) == 2
        for span in result.version_spans:
            expected = recomputed(models[span.version], request.token_ids, result.token_ids)
            under = slice(span.start, span.end)
            assert np.abs(np.array(result.logprobs[under]) - expected[under]).max() < TOLERANCE


def test_a_cache_too_small_for_all_makes_requests_wait_and_loses_none(start):
    engine = start(cache_tokens=512)
    requests = [ask(i, n=10, max_tokens=150) for i in range(24)]

    async def main():
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    model = model_with(WEIGHTS[0])
    for request, result in zip(requests, asyncio.run(main()), strict=True):
        assert len(result.token_ids) == 150
        expected = recomputed(model, request.token_ids, result.token_ids)
        assert np.abs(np.array(result.logprobs) - expected).max() < TOLERANCE
    assert engine.alive


def test_the_context_limit_ends_a_turn_and_refuses_a_prompt(start):
    engine = start(cache_tokens=256)
    result = asyncio.run(engine.generate(ask(0, n=200, max_tokens=500)))
    assert result.finish_reason == "length" and len(result.token_ids) == 256 - 2 * 16 - 200
    with pytest.raises(EngineError, match="context"):
        asyncio.run(engine.generate(ask(0, n=240)))
    assert engine.alive


def test_sampling_parameters_are_each_requests_own_and_shape_its_logprobs(start):
    engine = start()
    settings = [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"temperature": 2.0, "top_k": 5}]

    async def main():
        return await asyncio.gather(
            *(engine.generate(ask(i, max_tokens=60, **s)) for i, s in enumerate(settings))
        )

    model = model_with(WEIGHTS[0])
    for i, (s, result) in enumerate(zip(settings, asyncio.run(main()), strict=True)):
        expected = processed(model, prompt(i), result.token_ids, **s)
        assert np.abs(np.array(result.logprobs) - expected).max() < TOLERANCE


@torch.no_grad()
def processed(model, prompt, tokens, *, temperature=1.0, top_k=0, top_p=1.0):
    """By transformers' own processors."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    if temperature != 1.0:
        logits = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        logits = TopKLogitsWarper(top_k)(None, logits)
    if top_p < 1.0:
        logits = TopPLogitsWarper(top_p)(None, logits)
    return picked(logits, tokens)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_weights_equal_the_published_bits_in_either_storage(start, dtype, tied):
    weights = [bits_of(tiny_model(tied=tied))]
    weights.append(perturbed(weights[0], 9))
    # -0.0, a NaN payload, infinity and a denormal survive the way into a parameter and out again
    weights[1]["model.norm.weight"][:4] = [0x8000, 0x7FC1, 0xFF80, 0x0001]
    engine = start(tiny_model(7, dtype=dtype, tied=tied))
    with engine.paused():
        engine.apply(anchor(weights[0], 0))
        assert engine.weights_hash() == set_hash(weights[0])
        engine.apply(delta(weights[0], weights[1], 1))
        assert engine.weights_hash() == set_hash(weights[1])
        live = engine._weights.bits()
    assert live.keys() == weights[1].keys() and ("lm_head.weight" in live) is not tied
    assert all(np.array_equal(live[name], bits) for name, bits in weights[1].items())


def test_weights_that_bf16_cannot_hold_are_noticed(start):
    engine = start()
    parameter = engine._weights._parameters["model.norm.weight"]
    parameter.data[3] = 1.0 + 2**-20
    with engine.paused(), pytest.raises(WeightUpdateError) as e:
        engine.weights_hash()
    assert e.value.reason == "not_bf16"


def test_an_error_in_the_loop_fails_every_request_and_ends_the_engine(start):
    engine = start()

    def broken():
        raise RuntimeError("out of luck")

    async def main():
        tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=800))) for i in range(3)]
        assert await asyncio.to_thread(reached(engine, 3).wait, 30)
        engine._manager.between_steps(broken)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineError) and "out of luck" in str(r) for r in results)
        with pytest.raises(EngineError):
            await engine.generate(ask(9))

    asyncio.run(main())
    engine._manager._generation_thread.join(10)
    assert not engine.alive


def test_the_same_seed_samples_the_same(start):
    def sample(seed):
        return asyncio.run(start(seed=seed).generate(ask(0, max_tokens=40))).token_ids

    assert sample(11) == sample(11) != sample(12)


def test_a_directory_that_is_no_model_is_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model(tmp_path, "float32")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, "float32")


def test_a_saved_model_comes_back_from_its_directory(tmp_path):
    from headrace.schemas.config import EngineConfig

    tiny_model(4).save_pretrained(tmp_path)
    config = EngineConfig(cache_tokens=4096, max_requests=8)
    engine = TransformersEngine.from_directory(tmp_path, config)
    try:
        with engine.paused():
            assert engine.weights_hash() == set_hash(bits_of(tiny_model(4)))
        assert engine.version == -1 and engine.vocab_size == VOCAB and engine.logprobs_mode == "processed"
    finally:
        engine.close()
