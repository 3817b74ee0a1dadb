"""vLLM behind the engine protocol: token ids in and out, and weights that change between two tokens.

All of vLLM lives on the event loop of one thread; callers come from other loops and threads. New requests wait
outside while a pause is on, so that each is admitted under one version, and their keys and values are cached under
that version's salt: no request ever finds a prefix that other weights computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import tempfile
import threading
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ....schemas.errors import EngineError, EnginePoisonedError, HeadraceError, WeightUpdateError
from ..protocol import GenerateRequest, GenerateResult, WeightUpdate
from .accounts import check_spans
from .handover import write_update
from .shards import combined_hash
from .transport import Facts, Finished, Transport

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.002
POISONED = "the engine's weights are torn; it will reload an anchor"


@dataclass(slots=True)
class _InFlight:
    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(version that ended, tokens there were): at pauses only."""
    failure: EngineError | None = None


class VllmEngine:
    """An Engine around one vLLM."""

    def __init__(
        self,
        transport: Transport,
        *,
        kv_policy: Literal["recompute", "stale"] = "stale",
        pause_mode: Literal["keep", "abort", "drain"] = "keep",
        handover: Path | None = None,
    ) -> None:
        """Starts it; still without weights. Raises ConfigError, EngineError.

        `handover`: folder for updates on their way to the workers; None: one in memory, where there is such a thing.
        """
        self._transport = transport
        self._kv_policy, self._pause_mode = kv_policy, pause_mode
        self._version, self._salt = -1, ""
        self._run = uuid.uuid4().hex[:8]
        self._epochs = itertools.count()
        self._poisoned = self._closed = self._replaced = self._held = False
        self._keys = itertools.count()
        self._asked: set[Future[GenerateResult]] = set()
        self._flight: dict[str, _InFlight] = {}
        self._finished_tokens = 0
        self._staged: tuple[WeightUpdate, Path, str] | None = None
        self._pausers = threading.Lock()
        shared = Path("/dev/shm")
        parent = handover if handover is not None else shared if shared.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-", dir=parent))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._facts: Facts = self._call(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The policy version that the next token is sampled under; -1 before the first weights."""
        return self._version

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._asked)

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start, those of aborted requests left out."""
        return self._finished_tokens + sum(len(e.tokens) for e in list(self._flight.values()))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._facts.vocab_size

    @property
    def logprobs_mode(self) -> str:
        """`processed` unless vLLM was started otherwise."""
        return self._facts.logprobs_mode

    @property
    def alive(self) -> bool:
        """False once vLLM has died."""
        return not self._closed and self._transport.alive

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn; a turn that reaches the context limit ends with `length`. Raises EngineError."""
        max_tokens = self._admit(request)
        self._refuse()
        asked = asyncio.run_coroutine_threadsafe(self._generate(request, max_tokens), self._loop)
        self._asked.add(asked)
        try:
            return await asyncio.wrap_future(asked)
        finally:
            self._asked.discard(asked)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is sampled inside the block, in the way that the pause mode says. Not reentrant."""
        with self._pausers:
            self._call(self._pause())
            try:
                yield
            finally:
                self._call(self._resume())

    def stage(self, update: WeightUpdate) -> None:
        """Hand `update` to the workers and have it checked (else WeightUpdateError), while tokens flow."""
        self._unstage()
        path, digest = self._hand_over(update)
        try:
            self._background("headrace_stage", str(path), digest)
        except BaseException:
            path.unlink()
            raise
        self._staged = (update, path, digest)

    def apply(self, update: WeightUpdate) -> None:
        """Write `update` in place, only inside `paused()`; `stage` it before the pause to keep that short.

        WeightUpdateError: it does not fit and nothing was written. Any other error has poisoned the engine.
        """
        if self._staged is None or self._staged[0] is not update:
            self.stage(update)
        try:
            self._outcome(self._call(self._transport.rpc("headrace_fits", str(update.version))))
            self._call(self._write(update))
        except WeightUpdateError:
            raise
        except BaseException as e:
            self.poison()
            raise EngineError(f"version {update.version} was not written: {e}") from e
        self._replaced = True
        if update.base_version is None:
            self._poisoned = False

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError(`live_bits`) unless the workers' weights hold what `update` says, wherever it says something."""
        if self._staged is not None and self._staged[0] is update:
            (_, path, digest), self._staged = self._staged, None
        else:
            path, digest = self._hand_over(update)
        try:
            self._background("headrace_verify", str(path), digest)
        finally:
            path.unlink()

    def advance(self, version: int) -> None:
        """The same weights under the next version number; no pause."""
        self._call(self._advance(version))

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of the weights that the workers hold, in full; only inside `paused()`."""
        ranks = self._call(self._transport.rpc("headrace_hashes"))
        self._outcome(ranks)
        return combined_hash([rank["tensors"] for rank in ranks])

    def poison(self) -> None:
        """Refuse requests, and fail those in flight, until the next successful `apply` of an anchor."""
        self._poisoned = True
        self._call(self._fail_all(EnginePoisonedError(POISONED)))

    def close(self) -> None:
        """Fail what is in flight and end vLLM. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._call(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=30)
            shutil.rmtree(self._folder, ignore_errors=True)

    # On vLLM's loop.

    async def _start(self) -> Facts:
        self._open = asyncio.Event()
        self._open.set()
        return await self._transport.start()

    async def _generate(self, request: GenerateRequest, max_tokens: int) -> GenerateResult:
        entry = _InFlight(request)
        key = f"{self._run}-{next(self._keys)}"
        await self._open.wait()
        self._refuse()

        def sampled(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            entry.tokens.extend(tokens)
            # Rounding may put a probability of 1 a little above it.
            entry.logprobs.extend(min(p, 0.0) for p in logprobs)

        self._flight[key] = entry
        try:
            finished = await self._transport.generate(key, request, max_tokens, self._salt, sampled)
        finally:
            del self._flight[key]
            if entry.failure is not None:
                raise entry.failure
        return self._result(entry, finished)

    def _result(self, entry: _InFlight, finished: Finished) -> GenerateResult:
        count = len(entry.tokens)
        if not count:
            raise EngineError(f"request {entry.request.request_id} was aborted before its first token")
        check_spans(finished.spans, entry.marks, count, exact=self._transport.exact_counts)
        self._finished_tokens += count
        return GenerateResult(
            request_id=entry.request.request_id,
            token_ids=tuple(entry.tokens),
            logprobs=tuple(entry.logprobs),
            version_spans=finished.spans,
            finish_reason=finished.reason,
        )

    async def _pause(self) -> None:
        self._open.clear()
        if self._held:
            return  # torn weights: it has not gone on since
        mode: Literal["keep", "abort", "wait"] = "wait" if self._pause_mode == "drain" else self._pause_mode
        try:
            await self._transport.pause(mode)
        except BaseException:
            self._open.set()
            raise
        self._held = True

    async def _resume(self) -> None:
        try:
            if self._poisoned:
                return  # others may ask this vLLM without asking us: torn weights must not sample
            if self._replaced and self._kv_policy == "recompute" and self._flight:
                await self._transport.prefill_again()
            await self._transport.resume()
            self._held = False
        finally:
            self._replaced = False
            self._open.set()

    async def _write(self, update: WeightUpdate) -> None:
        await self._transport.write(update.version)
        for rank in await self._transport.rpc("headrace_wrote"):
            if rank["error"]:
                raise EngineError(": ".join(rank["error"]))
        await self._transport.label(update.version)
        self._mark()
        self._version = update.version
        self._salt = f"{self._run}:{update.version}:{next(self._epochs)}"

    async def _advance(self, version: int) -> None:
        await self._transport.rpc("headrace_advance", str(version))
        await self._transport.label(version)
        self._version = version

    async def _fail_all(self, error: EngineError) -> None:
        for entry in self._flight.values():
            entry.failure = error
        if self._flight and self._transport.alive:
            await self._transport.abort(list(self._flight))

    async def _end(self) -> None:
        if self._transport.alive:
            await self._fail_all(EngineError("the engine is closing"))
            async with asyncio.timeout(10):
                while self._flight:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await self._transport.close()

    def _mark(self) -> None:
        for entry in self._flight.values():
            entry.marks.append((self._version, len(entry.tokens)))

    # Below: any thread.

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except HeadraceError:
            raise
        except Exception as e:  # vLLM's own: its process has died, or a worker refused
            raise EngineError(f"vLLM: {type(e).__name__}: {e}") from e

    def _background(self, method: str, *args: str) -> None:
        """Work that the workers do beside their steps."""
        self._outcome(self._call(self._awaited(method, *args)))

    async def _awaited(self, method: str, *args: str) -> list[dict[str, Any]]:
        await self._transport.rpc(method, *args)
        while True:
            ranks = await self._transport.rpc("headrace_done")
            if all(rank["done"] for rank in ranks):
                return ranks
            await asyncio.sleep(POLL_SECONDS)

    def _hand_over(self, update: WeightUpdate) -> tuple[Path, str]:
        path = self._folder / f"{update.version}-{uuid.uuid4().hex[:8]}"
        try:
            return path, write_update(path, update)
        except OSError as e:
            raise EngineError(f"no room for version {update.version} in {self._folder}: {e}") from e

    def _unstage(self) -> None:
        if self._staged is not None:
            self._staged[1].unlink(missing_ok=True)
            self._staged = None
        self._call(self._transport.rpc("headrace_unstage"))

    def _outcome(self, ranks: Sequence[dict[str, Any]]) -> None:
        for rank in ranks:
            if rank.get("error"):
                reason, detail = rank["error"]
                raise WeightUpdateError(reason, detail)

    def _admit(self, request: GenerateRequest) -> int:
        size, context = len(request.token_ids), self._facts.context
        if size == 0 or request.max_tokens < 1 or request.temperature <= 0:
            raise EngineError(f"request {request.request_id}: needs tokens, max_tokens >= 1, temperature > 0")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self.vocab_size:
            raise EngineError(f"request {request.request_id}: a token id is not in [0, {self.vocab_size})")
        if size >= context:
            raise EngineError(f"request {request.request_id}: {size} tokens, the context ends at {context}")
        return min(request.max_tokens, context - size)

    def _refuse(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._poisoned:
            raise EnginePoisonedError(POISONED)
        if self._version < 0:
            raise EngineError("the engine has no weights yet")
