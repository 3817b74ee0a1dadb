"""The embedded engine: transformers' continuous batching, with weights that can be replaced between two tokens.

Log-probabilities are of the processed distribution (after temperature, top-k and top-p). After an update,
requests in flight go on with their old keys and values (kv_policy `stale`) or prefill their tokens again under
the new weights (`recompute`): then the log-probabilities under each version span are what one forward pass
with that version's weights gives. Declared limit: prefixes are not shared between requests, so no request can
meet keys and values of another version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from ...schemas.config import EngineConfig
from ...schemas.errors import ConfigError, EngineError, EnginePoisonedError, WeightUpdateError
from . import attention
from .batching import PAGE, PausableManager
from .live_weights import LiveWeights, Prepared, not_what_was_written
from .protocol import GenerateRequest, GenerateResult, WeightUpdate
from .spans import VersionMarks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    request: GenerateRequest
    future: asyncio.Future[GenerateResult]
    marks: VersionMarks = field(default_factory=VersionMarks)


class TransformersEngine:
    """An Engine around one causal language model."""

    def __init__(
        self,
        model: Any,
        *,
        kv_policy: Literal["recompute", "stale"] = "stale",
        max_requests: int = 256,
        max_batch_tokens: int = 1024,
        cache_tokens: int = 65536,
        seed: int | None = None,
        version: int = -1,
    ) -> None:
        """`model`: float32 or bfloat16, in eval mode; its float32 parameters are rounded to bf16 values.

        `version`: what its weights are; -1: none yet, so requests are refused until the first `apply`.
        """
        config = model.config.get_text_config()
        if model.device.type == "cpu" and attention.supports(config):
            attention.register()
            model.set_attn_implementation(attention.NAME)
        self._weights = LiveWeights(model)
        self._weights.round_to_bf16()
        self._kv_policy = kv_policy
        self._vocab_size = int(config.vocab_size)
        positions = getattr(config, "max_position_embeddings", None) or cache_tokens
        self._context = min(positions, cache_tokens - 2 * PAGE)
        self._version = version
        self._poisoned = self._closed = self._replaced = False
        self._staged: tuple[WeightUpdate, tuple[Prepared, ...]] | None = None
        self._written: tuple[WeightUpdate, str | None] | None = None
        """The last update and the tensor, if any, that did not hold it right afterwards: `verify` has not been told yet."""
        self._flight: dict[str, _InFlight] = {}
        self._lock = threading.Lock()
        self._keys = itertools.count()
        self._finished_tokens = 0
        self._manager = PausableManager(
            model,
            deliver=self._deliver,
            max_requests=max_requests,
            max_batch_tokens=max_batch_tokens,
            cache_tokens=cache_tokens,
            seed=seed,
        )
        self._manager.warmup()  # allocates the cache here, so that a lack of memory is raised here
        self._manager.start()

    @classmethod
    def from_directory(
        cls, path: Path, config: EngineConfig, *, seed: int | None = None
    ) -> TransformersEngine:
        """The engine for the Hugging Face model directory `path`, still without a version. Raises ConfigError."""
        return cls(
            load_model(path, config.dtype),
            kv_policy=config.kv_policy,
            max_requests=config.max_requests,
            max_batch_tokens=config.max_batch_tokens,
            cache_tokens=config.cache_tokens,
            seed=seed,
        )

    @property
    def version(self) -> int:
        """The policy version that the next token is sampled under; -1 before the first weights."""
        return self._version

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._flight)

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start, those of aborted requests left out."""
        return self._finished_tokens + sum(self._manager.progress().values())

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    @property
    def logprobs_mode(self) -> str:
        """Always `processed`."""
        return "processed"

    @property
    def alive(self) -> bool:
        """False once the generation loop has ended."""
        return self._manager.is_running()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn; a turn that reaches the context limit ends with `length`. Raises EngineError."""
        max_tokens = self._admit(request)
        # Callers' ids may repeat; the manager's must not.
        key = str(next(self._keys))
        entry = _InFlight(request, asyncio.get_running_loop().create_future())
        with self._lock:
            self._refuse()
            self._flight[key] = entry
        try:
            self._manager.submit(
                key,
                request.token_ids,
                max_tokens=max_tokens,
                stop_token_ids=request.stop_token_ids,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
            )
            return await entry.future
        finally:
            if self._flight.pop(key, None) is not None:
                self._manager.cancel_request(key)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is sampled inside the block. Not reentrant."""
        with self._manager.paused():
            try:
                yield
            finally:
                if self._replaced and self._kv_policy == "recompute":
                    self._manager.prefill_again()
                self._replaced = False

    def stage(self, update: WeightUpdate) -> None:
        """Check that `update` fits (else WeightUpdateError) and move it next to the weights, while tokens flow."""
        self._staged = None
        self._staged = update, self._weights.prepare(update)

    def apply(self, update: WeightUpdate) -> None:
        """Write `update` in place, only inside `paused()`.

        WeightUpdateError: it does not fit and nothing was written. Any other error has poisoned the engine.
        """
        prepared = self._prepared(update)
        if update.base_version is not None and update.base_version != self._version:
            raise WeightUpdateError("base_version", f"{update.base_version} on top of {self._version}")
        try:
            self._written = update, self._weights.write(update, prepared)
        except BaseException:
            self.poison()
            raise
        self._set_version(update.version)
        self._replaced = self._replaced or bool(update.patches)
        if update.base_version is None:
            self._poisoned = False

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError unless the live weights hold what `update` says, wherever it says something.

        May also be called while tokens flow.
        """
        written, self._written = self._written, None
        if written is None or written[0] is not update:
            self._weights.verify(update, self._prepared(update))
        elif written[1] is not None:
            raise not_what_was_written(written[1])
        self._staged = None

    def advance(self, version: int) -> None:
        """The same weights under the next version number; the loop takes it up before its next step."""
        self._manager.between_steps(lambda: self._set_version(version))

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of the live weights, in full; only inside `paused()`."""
        return self._weights.hash()

    def poison(self) -> None:
        """Refuse requests, and fail those in flight, until the next successful `apply` of an anchor."""
        with self._lock:
            self._poisoned = True
        self._fail_all(EnginePoisonedError("the engine's weights are torn; it will reload an anchor"))

    def close(self) -> None:
        """Fail what is in flight and end the loop. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._fail_all(EngineError("the engine is closing"))
        self._manager.stop(block=True, hard_stop=True)

    def _admit(self, request: GenerateRequest) -> int:
        size = len(request.token_ids)
        if size == 0 or request.max_tokens < 1 or request.temperature <= 0:
            raise EngineError(f"request {request.request_id}: needs tokens, max_tokens >= 1, temperature > 0")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocab_size:
            raise EngineError(f"request {request.request_id}: a token id is not in [0, {self._vocab_size})")
        if size >= self._context:
            raise EngineError(
                f"request {request.request_id}: {size} tokens, the context ends at {self._context}"
            )
        return min(request.max_tokens, self._context - size)

    def _refuse(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._poisoned:
            raise EnginePoisonedError("the engine's weights are torn; it will reload an anchor")
        if self._version < 0:
            raise EngineError("the engine has no weights yet")

    def _prepared(self, update: WeightUpdate) -> tuple[Prepared, ...]:
        """What `stage` made of this very update; made now where it was not staged."""
        if self._staged is None or self._staged[0] is not update:
            self.stage(update)
        assert self._staged is not None
        return self._staged[1]

    def _set_version(self, version: int) -> None:
        for key, count in self._manager.progress().items():
            entry = self._flight.get(key)
            if entry is not None:
                entry.marks.mark(self._version, count)
        self._version = version

    def _deliver(self, outputs: list[Any]) -> None:
        """Hand over what a step finished: one call into each event loop, from the generation thread."""
        done: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        for output in outputs:
            entry = self._flight.pop(output.request_id, None)
            if entry is not None:
                result = EngineError(output.error) if output.error else self._result(entry, output)
                done.setdefault(entry.future.get_loop(), []).append((entry.future, result))
        _settle_all(done)

    def _result(self, entry: _InFlight, output: Any) -> GenerateResult:
        tokens = tuple(output.generated_tokens)
        self._finished_tokens += len(tokens)
        stopped = tokens[-1] in entry.request.stop_token_ids
        return GenerateResult(
            request_id=entry.request.request_id,
            token_ids=tokens,
            # Rounding may put a probability of 1 a little above it.
            logprobs=tuple(min(p, 0.0) for p in output.logprobs),
            version_spans=entry.marks.spans(self._version, len(tokens)),
            finish_reason="stop" if stopped else "length",
        )

    def _fail_all(self, error: EngineError) -> None:
        done: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
        for key in list(self._flight):
            entry = self._flight.pop(key, None)
            if entry is not None:
                self._manager.cancel_request(key)
                done.setdefault(entry.future.get_loop(), []).append((entry.future, error))
        _settle_all(done)


def load_model(path: Path, dtype: Literal["float32", "bfloat16"]) -> Any:
    """The causal language model in directory `path`, without any look at the network. Raises ConfigError."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"policy.model {path} is not a Hugging Face model directory: it has no config.json")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"policy.model {path} cannot be loaded: {e}") from None
    return model.eval()


def _settle_all(done: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]]) -> None:
    for loop, settled in done.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in settled:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)
