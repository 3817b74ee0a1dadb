"""An engine without a model: tokens and log-probabilities are a pure function of context, position and version.

For tests of everything around an engine. Each token is one step of a loop on the event loop, so updates land
between tokens as with a real one; `gate` lets a test decide when each step happens. Its weights are a small
mapping of bf16 bit patterns, written and hashed like real ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xxhash

from ...schemas.dtypes import Dtype
from ...schemas.errors import EngineError, EnginePoisonedError, WeightUpdateError
from ...schemas.update import WeightUpdate, apply_update, check_same_tensors
from ...schemas.weight_hash import set_hash
from .protocol import GenerateRequest, GenerateResult
from .spans import VersionMarks

Gate = Callable[[], Awaitable[None]]
"""Awaited before each token."""


def scripted_token(context: Sequence[int], version: int, vocab_size: int) -> tuple[int, float]:
    """The token and its log-probability that follow `context` (prompt and sampled tokens) under `version`."""
    digest = xxhash.xxh3_64_intdigest(np.asarray([version, *context], dtype=np.int64).tobytes())
    return digest % vocab_size, -((digest >> 32) % 4096 + 1) / 1024


class ScriptedEngine:
    """An Engine whose every answer a test can compute."""

    def __init__(
        self,
        weights: dict[str, np.ndarray] | None = None,
        *,
        version: int = -1,
        vocab_size: int = 64,
        gate: Gate | None = None,
    ) -> None:
        """`weights`: name -> uint16 bits, copied; without them a first anchor brings names and shapes."""
        self._weights = {name: bits.copy() for name, bits in (weights or {}).items()}
        self._formats: dict[str, Dtype] = {}
        self._version = version
        self._vocab_size = vocab_size
        self._gate = gate if gate is not None else _no_delay
        self._poisoned = self._closed = False
        self._step = threading.Lock()
        self._flight: dict[asyncio.Task[GenerateResult], VersionMarks] = {}
        self._counts: dict[asyncio.Task[GenerateResult], int] = {}
        self._generated = 0

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
        """Tokens sampled since the start."""
        return self._generated

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
        """False after `close`."""
        return not self._closed

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn. Raises EngineError."""
        if not request.token_ids or request.max_tokens < 1 or request.temperature <= 0:
            raise EngineError(f"request {request.request_id}: needs tokens, max_tokens >= 1, temperature > 0")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocab_size:
            raise EngineError(f"request {request.request_id}: a token id is not in [0, {self._vocab_size})")
        self._refuse()
        task = asyncio.current_task()
        assert task is not None
        marks, tokens, logprobs = VersionMarks(), list[int](), list[float]()
        self._flight[task], self._counts[task] = marks, 0
        try:
            while True:
                await self._gate()
                while not self._step.acquire(blocking=False):  # noqa: ASYNC110  (another thread holds it)
                    await asyncio.sleep(0.001)
                try:
                    self._refuse()
                    token, logprob = scripted_token(
                        [*request.token_ids, *tokens], self._version, self._vocab_size
                    )
                    tokens.append(token)
                    logprobs.append(logprob)
                    self._counts[task] = len(tokens)
                    self._generated += 1
                    stopped = token in request.stop_token_ids
                    if stopped or len(tokens) >= request.max_tokens:
                        return GenerateResult(
                            request_id=request.request_id,
                            token_ids=tuple(tokens),
                            logprobs=tuple(logprobs),
                            version_spans=marks.spans(self._version, len(tokens)),
                            finish_reason="stop" if stopped else "length",
                        )
                finally:
                    self._step.release()
        finally:
            self._flight.pop(task, None)
            self._counts.pop(task, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is sampled inside the block. Not reentrant."""
        with self._step:
            yield

    def apply(self, update: WeightUpdate) -> None:
        """Write `update` in place, only inside `paused()`. WeightUpdateError: nothing was written."""
        anchor = update.base_version is None
        shapes = {p.name: p.shape for p in update.patches}
        if self._weights:
            known = {name: bits.shape for name, bits in self._weights.items()}
            check_same_tensors(known, shapes if anchor else {**known, **shapes})
        if not anchor and update.base_version != self._version:
            raise WeightUpdateError("base_version", f"{update.base_version} on top of {self._version}")
        if not self._weights:
            self._weights = {p.name: np.zeros(p.shape, dtype=p.dtype.bits) for p in update.patches}
        self._formats.update((p.name, p.dtype) for p in update.patches)
        self._write(update)
        self._set_version(update.version)
        if anchor:
            self._poisoned = False

    def advance(self, version: int) -> None:
        """The same weights under the next version number."""
        with self._step:
            self._set_version(version)

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError unless the weights hold what `update` says, wherever it says something."""
        for patch in update.patches:
            flat = self._weights[patch.name].reshape(-1)
            if not np.array_equal(flat if patch.indices is None else flat[patch.indices], patch.bits):
                raise WeightUpdateError("live_bits", f"{patch.name} does not hold what was written")

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of the weights."""
        return set_hash(self._weights, dtypes=self._formats)

    def poison(self) -> None:
        """Refuse requests, and fail those in flight, until the next successful `apply` of an anchor."""
        self._poisoned = True

    def close(self) -> None:
        """Fail what is in flight. Idempotent."""
        self._closed = True

    def _write(self, update: WeightUpdate) -> None:
        apply_update(self._weights, update)

    def _refuse(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._poisoned:
            raise EnginePoisonedError("the engine's weights are torn; it will reload an anchor")
        if self._version < 0:
            raise EngineError("the engine has no weights yet")

    def _set_version(self, version: int) -> None:
        for task, marks in list(self._flight.items()):
            marks.mark(self._version, self._counts[task])
        self._version = version


async def _no_delay() -> None:
    await asyncio.sleep(0)
