"""The embedded engine under updates: six requests in flight, ten versions, and every number against transformers.

In float32 the engine and one plain forward pass agree within 2e-5, over the processed distribution at temperature 1.
"""

import asyncio
import threading
import time

import numpy as np
import pytest
from engine_kit import (
    VOCAB,
    bits_of,
    continued,
    delta,
    model_with,
    perturbed,
    recomputed,
    tiny_model,
)
from weights_kit import Setup, Trainer

from headrace.producers.engines.live_weights import Prepared
from headrace.producers.engines.pauses import Pauses
from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.transformers import TransformersEngine
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import EnginePoisonedError
from headrace.schemas.weight_hash import set_hash

TOLERANCE = 2e-5
UPDATES, IN_FLIGHT, TOKENS, EVERY = 10, 6, 150, 12
WEIGHTS = [bits_of(tiny_model())]
for _seed in range(1, UPDATES + 1):
    WEIGHTS.append(perturbed(WEIGHTS[-1], _seed))


def prompt(i: int, n: int = 8) -> tuple[int, ...]:
    return tuple((5 * i + j * j + 2) % VOCAB for j in range(n))


def ask(i: int, **more) -> GenerateRequest:
    return GenerateRequest(request_id=str(i), token_ids=prompt(i, 8 + i), **{"max_tokens": TOKENS, **more})


def start(policy: str) -> TransformersEngine:
    return TransformersEngine(
        tiny_model(), kv_policy=policy, max_requests=16, cache_tokens=16384, seed=3, version=0
    )


def halted(engine: TransformersEngine, count: int) -> threading.Event:
    """Set once some request has `count` tokens; then the loop waits for the pause, however late that is asked for."""
    event, manager = threading.Event(), engine._manager

    def look() -> None:
        if max(manager.progress().values(), default=0) < count:
            manager.between_steps(look)
            return
        event.set()
        while not manager._wanted:
            manager._gate.wait(0.01)  # lets go of the gate that the pause must pass

    manager.between_steps(look)
    return event


class Run:
    """Ten updates under six requests; what was seen at each pause."""

    def __init__(self, policy: str) -> None:
        self.engine = start(policy)
        self.boundaries: list[dict[str, int]] = []
        self.fresh: list = []
        try:
            self.results = asyncio.run(self._run())
        finally:
            self.engine.close()

    async def _run(self):
        tasks = [asyncio.create_task(self.engine.generate(ask(i))) for i in range(IN_FLIGHT)]
        for version in range(1, UPDATES + 1):
            await asyncio.to_thread(self._update, version, halted(self.engine, EVERY * version))
            # A new request with a prefix that requests in flight and earlier ones have in their caches.
            self.fresh.append(await self.engine.generate(ask(0, max_tokens=4)))
        return await asyncio.gather(*tasks)

    def _update(self, version: int, seen) -> None:
        assert seen.wait(60)
        update = delta(WEIGHTS[version - 1], WEIGHTS[version], version)
        self.engine.stage(update)
        with self.engine.paused():
            before = self.engine._manager.progress()
            self.engine.apply(update)
            self.engine.verify(update)
            assert self.engine.weights_hash() == set_hash(WEIGHTS[version])
            time.sleep(0.01)  # in which a loop that runs would sample
            assert self.engine._manager.progress() == before, "a token was sampled during the pause"
            self.boundaries.append(before)


@pytest.fixture(scope="module")
def models():
    return [model_with(w) for w in WEIGHTS]


@pytest.fixture(scope="module", params=["recompute", "stale"])
def run(request):
    return request.param, Run(request.param)


def test_version_spans_are_exactly_the_token_counts_at_the_pauses(run):
    _, made = run
    for i, result in enumerate(made.results):
        assert len(result.token_ids) == len(result.logprobs) == TOKENS
        # The manager's keys are given in the order of asking; the short requests came in between.
        counts = [made.boundaries[v][str(i)] for v in range(UPDATES)]
        ends = [*counts, TOKENS]
        spans = [(s.version, s.start, s.end) for s in result.version_spans]
        assert spans == [(v, 0 if v == 0 else ends[v - 1], ends[v]) for v in range(UPDATES + 1)]


def test_logprobs_are_those_of_one_forward_pass_with_each_spans_weights(run, models):
    policy, made = run
    for i, result in enumerate(made.results):
        first = result.version_spans[0]
        logprobs = np.array(result.logprobs)
        for span in result.version_spans if policy == "recompute" else (first,):
            whole = recomputed(models[span.version], prompt(i, 8 + i), result.token_ids)
            under = slice(span.start, span.end)
            assert np.abs(logprobs[under] - whole[under]).max() < TOLERANCE
        if policy == "stale":
            second = result.version_spans[1]
            tokens = result.token_ids[: second.end]
            old_keys = continued(models[0], models[1], prompt(i, 8 + i), tokens, second.start)
            assert np.abs(logprobs[second.start : second.end] - old_keys).max() < TOLERANCE
            whole = recomputed(models[1], prompt(i, 8 + i), tokens)[second.start :]
            assert np.abs(logprobs[second.start : second.end] - whole).max() > 1000 * TOLERANCE


def test_a_new_request_never_meets_keys_and_values_of_old_weights(run, models):
    _, made = run
    for version, result in enumerate(made.fresh, start=1):
        assert [s.version for s in result.version_spans] == [version]
        whole = recomputed(models[version], prompt(0), result.token_ids)
        assert np.abs(np.array(result.logprobs) - whole).max() < TOLERANCE
        old = recomputed(models[version - 1], prompt(0), result.token_ids)
        assert np.abs(np.array(result.logprobs) - old).max() > 1000 * TOLERANCE


class Models(Trainer):
    """Publishes the tiny model's versions."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [WEIGHTS[0]]
        self.records = [self._record(0, None, None)]

    def publish(self, version: int):
        self.weights.append(WEIGHTS[version])
        self.records.append(self._record(version, WEIGHTS[version - 1], WEIGHTS[version]))
        return self.records[-1]


@pytest.mark.parametrize("how", ["breaks off", "writes something else"])
def test_a_failed_update_poisons_is_told_and_is_healed_from_the_anchor(how, models, monkeypatch):
    trainer, engine = Models(), start("recompute")
    write = Prepared.write

    def failing(piece):
        if piece.name == "model.norm.weight" and how == "breaks off":
            raise RuntimeError("the device is gone")
        write(piece)
        if piece.name == "model.norm.weight":
            piece.target[0 if piece.indices is None else piece.indices[0]] ^= 1

    async def main():
        task = asyncio.create_task(engine.generate(ask(1, max_tokens=900)))
        assert await asyncio.to_thread(halted(engine, 5).wait, 60)
        await asyncio.to_thread(s.subscriber.follow)
        with pytest.raises(EnginePoisonedError):
            await task
        with pytest.raises(EnginePoisonedError):
            await engine.generate(ask(2))

    try:
        s = Setup(trainer, engine)
        s.see(trainer.records[0])
        with monkeypatch.context() as patched:
            patched.setattr(Prepared, "write", failing)
            s.subscriber.see([trainer.publish(1)])
            asyncio.run(main())
        assert s.last.state is EngineState.POISONED and s.last.weights_hash is None
        assert ("device is gone" if how == "breaks off" else "does not hold") in s.last.reason
        s.clock.now += 60
        s.settle()
        assert s.last.state is EngineState.IDLE and s.last.version == 1 and s.last.reason is None
        assert engine.weights_hash() == s.last.weights_hash == trainer.hash(1)
        result = asyncio.run(engine.generate(ask(3, max_tokens=20)))
        whole = recomputed(models[1], prompt(3, 11), result.token_ids)
        assert np.abs(np.array(result.logprobs) - whole).max() < TOLERANCE
    finally:
        engine.close()


def test_a_held_engine_is_updated_and_goes_on_with_the_new_weights_when_it_is_let_go(models):
    trainer, engine = Models(), start("recompute")
    pauses = Pauses(engine)
    s = Setup(trainer, engine, pauses)

    async def main():
        task = asyncio.create_task(engine.generate(ask(0, max_tokens=60)))
        assert await asyncio.to_thread(halted(engine, 10).wait, 60)
        await asyncio.to_thread(pauses.hold)
        had = engine.generated_tokens
        await asyncio.to_thread(s.see, trainer.publish(1), trainer.publish(2))
        assert engine.version == s.last.version == 2 and s.last.held is True and s.last.paused is False
        late = asyncio.create_task(engine.generate(ask(1, max_tokens=5)))
        await asyncio.sleep(0.02)
        assert engine.generated_tokens == had and not task.done() and not late.done()
        await asyncio.to_thread(pauses.release)
        return had, await task, await late

    try:
        s.see(trainer.records[0])
        had, result, late = asyncio.run(main())
        assert [(x.version, x.start, x.end) for x in result.version_spans] == [(0, 0, had), (2, had, 60)]
        whole = recomputed(models[2], prompt(0), result.token_ids)[had:]
        assert np.abs(np.array(result.logprobs[had:]) - whole).max() < TOLERANCE
        assert [x.version for x in late.version_spans] == [2]
    finally:
        pauses.release()
        engine.close()
