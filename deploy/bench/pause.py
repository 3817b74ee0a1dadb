"""How long an engine stands still for an update: the write beside a plain copy, the pause beside a full load.

A random model of 191 million parameters in bf16, a part of the elements of every tensor changed. All figures of one
engine are taken in turns in one run, so that the ratios hold on a busy machine too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from ...producers.engines.protocol import Engine, GenerateRequest, ReadsBack, Stages
from ...schemas.config import Config
from ...schemas.delta import decode_anchor, decode_delta, encode_anchor, encode_delta
from ...schemas.update import TensorPatch, WeightUpdate, apply_update
from ...schemas.weight_hash import set_hash, tensor_hashes
from ...streams.blobs import BlobStore
from .random_model import make_model, read_bits, tensors

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseLoad:
    """What is measured."""

    changed: float = 0.01
    """Part of the elements of every tensor."""
    rounds: int = 5
    """Updates without requests, and as many with; medians count."""
    requests: int = 6
    """In flight, for the second half."""
    hidden: int = 768
    layers: int = 19
    vocab: int = 34_816


def measure(kind: str, folder: Path, load: PauseLoad, say: Say) -> dict[str, Any]:
    """The figures of one engine kind; `folder`: where the model goes. Raises ConfigError where it is not installed."""
    from ...producers.engines.role import make_engine

    model = folder / "model"
    if not model.exists():
        say("making a random model")
        make_model(model, hidden=load.hidden, layers=load.layers, vocab=load.vocab)
    weights = read_bits(model)
    config = Config.model_validate(
        {
            "run": {"namespace": "bench", "dir": str(folder)},
            "policy": {"model": str(model)},
            "engine": {"kind": kind, "dtype": "bfloat16", "max_requests": 8, "cache_tokens": 8192},
        }
    )
    say(f"starting the {kind} engine")
    engine = make_engine(config, "bench")
    try:
        figures = _Bench(engine, weights, load, model, say).run(kind)
    finally:
        engine.close()
    return {
        "params": sum(b.size for b in weights.values()),
        "changed_fraction": load.changed,
        **{f"{kind}_{name}": round(value, 4) for name, value in figures.items()},
    }


class _Bench:
    def __init__(
        self, engine: Engine, weights: dict[str, np.ndarray], load: PauseLoad, model: Path, say: Say
    ) -> None:
        self._engine, self._weights, self._load = engine, weights, load
        self._model, self._say = model, say
        self._hashes = tensor_hashes(weights)
        # Copied, so that every page is there before a clock runs.
        self._resident = {name: bits.copy() for name, bits in weights.items()}
        self._version = 0
        self._rng = np.random.default_rng(0)
        self._seconds: dict[str, list[float]] = {}

    def run(self, kind: str) -> dict[str, float]:
        """Medians in ms, and ratios."""
        self._take(self._whole(), "first")
        self._take(self._next(), "warm")
        self._say("updates without requests")
        for _ in range(self._load.rounds):
            update = self._next()
            self._copy(update)
            self._take(update, "")
            self._load_again(kind)
        self._update_in_full()
        self._say(f"updates with {self._load.requests} requests in flight")
        with _asking(self._engine, self._load.requests, self._load.vocab):
            for _ in range(self._load.rounds):
                self._take(self._next(), "busy")
        if kind == "vllm":
            self._load_in_vllm()
        ms = {name: 1000 * statistics.median(taken) for name, taken in self._seconds.items()}
        loads = [name for name in ("load", "reload", "full_update") if name in ms]
        ratios = {f"pause_over_{name}": ms["pause"] / ms[name] for name in loads}
        return {
            **{f"{name}_ms": value for name, value in ms.items() if not name.startswith(("first", "warm"))},
            "apply_over_copy": ms["apply"] / ms["copy"],
            **ratios,
        }

    def _update_in_full(self) -> None:
        """What following by anchors alone costs for each version: fetch, check, stage, and all bits in the pause."""
        store = BlobStore(str(self._model.parent / "store"))
        ref = store.put("anchor", encode_anchor(self._weights, self._version))
        with self._timed("full_update"):
            self._take(decode_anchor(store.get(ref), version=self._version), "full")

    def _whole(self) -> WeightUpdate:
        """The version that is live, as an anchor's update."""
        patches = (
            TensorPatch(name=name, shape=bits.shape, indices=None, bits=bits.reshape(-1))
            for name, bits in self._weights.items()
        )
        return WeightUpdate(
            version=self._version,
            patches=tuple(patches),
            weights_hash=set_hash(self._weights, self._hashes),
            hashes=self._hashes,
        )

    def _next(self) -> WeightUpdate:
        """The next version, through its bytes; this process's copy then has it."""
        new = {name: self._changed(bits) for name, bits in self._weights.items()}
        version = self._version + 1
        made = encode_delta(
            self._weights, new, base_version=self._version, version=version, base_hashes=self._hashes
        )
        update = decode_delta(made.blob, self._weights, base_version=self._version, base_hashes=self._hashes)
        apply_update(self._weights, update)
        self._hashes.update(update.hashes)
        self._version = version
        return update

    def _changed(self, bits: np.ndarray) -> np.ndarray:
        new = bits.copy().reshape(-1)
        where = self._rng.random(new.size, dtype=np.float32) < self._load.changed
        new[where] ^= 1  # the smallest step, and never out of the finite numbers
        return new.reshape(bits.shape)

    def _take(self, update: WeightUpdate, name: str) -> None:
        """As the subscriber does: stage, pause, apply, look, resume."""
        prefix = f"{name}_" if name else ""
        with self._timed(f"{prefix}stage"):
            if isinstance(self._engine, Stages):
                self._engine.stage(update)
        with self._timed(f"{prefix}pause"), self._engine.paused():
            with self._timed(f"{prefix}apply"):
                self._engine.apply(update)
            with self._timed(f"{prefix}verify"):
                if isinstance(self._engine, ReadsBack):
                    self._engine.verify(update)
                elif self._engine.weights_hash() != update.weights_hash:
                    raise AssertionError("the live weights are not those of the update")

    def _copy(self, update: WeightUpdate) -> None:
        """The bytes of every changed tensor, once from memory to memory."""
        with self._timed("copy"):
            for patch in update.patches:
                np.copyto(self._resident[patch.name], self._weights[patch.name])

    def _load_again(self, kind: str) -> None:
        """What an engine without deltas does for each version.

        `load`: by its own loader, from the model's files until every weight is in memory of its own. `reload`: the
        least that it can be, the files (in the page cache) copied into memory that is there already.
        """
        if kind == "transformers":
            from ...producers.engines.transformers import load_model

            with self._timed("load"):
                model = load_model(self._model, "bfloat16")
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()  # the loader only maps the files
            del model
        with self._timed("reload"):
            for name, tensor in tensors(self._model):
                np.copyto(self._resident[name], tensor)

    def _load_in_vllm(self) -> None:
        """vLLM's own loading of the model's files; afterwards the weights are those, so it comes last."""
        engine: Any = self._engine  # the protocol has no word for this
        for _ in range(self._load.rounds):
            with engine.paused(), self._timed("load"):
                engine._call(engine._transport.rpc("reload_weights"))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds.setdefault(name, []).append(time.perf_counter() - began)


@contextmanager
def _asking(engine: Engine, requests: int, vocab: int) -> Iterator[None]:
    """So many requests in flight inside the block, each followed by another one."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def ask(i: int) -> None:
        while True:
            prompt = tuple((i * 7919 + j) % vocab for j in range(32))
            await engine.generate(GenerateRequest(request_id=str(i), token_ids=prompt, max_tokens=512))

    async def begin() -> list[asyncio.Task[None]]:
        return [asyncio.create_task(ask(i)) for i in range(requests)]

    async def end(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    before = engine.generated_tokens
    tasks = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    while engine.generated_tokens < before + requests and not any(t.done() for t in tasks):
        time.sleep(0.01)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(end(tasks), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
