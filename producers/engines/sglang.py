"""An SGLang server as an Engine, over HTTP. Contract-tested against a stub (tests/sglang_stub.py), not run on a real one.

Weights: a model directory that this engine keeps patched (sglang_checkpoint.py) and the server loads whole while it
is paused. Versions: the server's own spans (`weight_versions`) are the only authority for a request that crossed an
update; from a server without them such a request is refused, because what has arrived here when a pause begins is
not what had been sampled then. Prefixes are shared inside one version only (`extra_key`). Not proven over HTTP: that
rows which were not read back are live; the server's tensor-parallel ranks; and, in_place with overlap scheduling,
that SGLang counts a step whose result was still queued at the pause for the old version (--disable-overlap-schedule
or retract avoid the question).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from ...schemas.errors import EngineError, EnginePoisonedError, WeightUpdateError
from ...schemas.update import WeightUpdate
from .protocol import GenerateRequest, GenerateResult
from .sglang_checkpoint import Checkpoint
from .sglang_control import ServerControl
from .sglang_http import ServerConnection, ServerError
from .sglang_spans import ForeignVersionError, Lived, attribute
from .sglang_wire import Answer, request_body

logger = logging.getLogger(__name__)

PauseMode = Literal["in_place", "retract", "abort"]
STILL_SECONDS = 0.02
LONGEST_SETTLING = 1.0


@dataclass(slots=True, eq=False)
class _InFlight:
    request: GenerateRequest
    rid: str
    version: int
    """At admission."""
    floor: int
    """The oldest version with the same weights."""
    loads: int
    """Loads that had begun at admission."""
    tokens: int = 0
    failure: EngineError | None = None
    future: concurrent.futures.Future[GenerateResult] | None = field(default=None)


class SglangEngine:
    """An Engine around the server behind `connection`, which this object closes."""

    def __init__(
        self,
        connection: ServerConnection,
        control: ServerControl,
        checkpoint: Checkpoint,
        *,
        vocab_size: int,
        context: int,
        pause_mode: PauseMode = "in_place",
        stream: bool = False,
        verify_tensors: int = 4,
        watch_seconds: float = 5.0,
    ) -> None:
        """`context`: tokens of the longest sequence. `verify_tensors`: how many are read back after an update."""
        self._connection, self._control, self._checkpoint = connection, control, checkpoint
        self._vocab_size, self._context = vocab_size, context
        self._mode, self._stream, self._verify_tensors = pause_mode, stream, verify_tensors
        self._version = self._floor = self._newest = -1
        self._loads = 0
        self._poisoned = self._closed = False
        self._lost: str | None = None
        self._flight: dict[str, _InFlight] = {}
        self._finished_tokens = 0
        self._lock = threading.Lock()
        self._controlling = threading.RLock()
        """Held by whoever pauses the server or changes its weights."""
        self._prefix, self._ids = uuid.uuid4().hex[:12], itertools.count()
        self._look_now, self._watch_seconds = threading.Event(), watch_seconds
        self._watcher = threading.Thread(target=self._watch, name="sglang-watch", daemon=True)
        self._watcher.start()

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
        """Tokens sampled since the start; without streaming those of finished requests."""
        return self._finished_tokens + sum(entry.tokens for entry in list(self._flight.values()))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._vocab_size

    @property
    def logprobs_mode(self) -> str:
        """`processed`: after the temperature. Requests with top-p or top-k are refused: SGLang's are from before those."""
        return "processed"

    @property
    def alive(self) -> bool:
        """False after `close`. A server that is away may come back."""
        return not self._closed and self._connection.alive

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn; a turn that reaches the context limit ends with `length`. Raises EngineError."""
        self._admit(request)
        with self._lock:
            self._refuse()
            rid = f"{self._prefix}-{next(self._ids)}"
            entry = _InFlight(request, rid, self._version, self._floor, self._loads)
            self._flight[rid] = entry
        try:
            entry.future = self._connection.submit(self._exchange(entry))
            if entry.failure is not None:
                entry.future.cancel()
            return await asyncio.wrap_future(entry.future)
        except asyncio.CancelledError:
            if entry.failure is not None:
                raise entry.failure from None
            raise
        finally:
            self._flight.pop(rid, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is sampled inside the block. Raises EngineError where the server cannot be stopped or started."""
        with self._controlling:
            self._pause()
            try:
                yield
            except BaseException:
                with contextlib.suppress(EngineError):  # it has been logged, and the cause matters more
                    self._resume()
                raise
            self._resume()

    def apply(self, update: WeightUpdate) -> None:
        """Write `update`, only inside `paused()`. WeightUpdateError: it does not fit and nothing was written.

        Any other error has poisoned the engine.
        """
        self._checkpoint.check(update)
        if update.base_version is not None and update.base_version != self._version:
            raise WeightUpdateError("base_version", f"{update.base_version} on top of {self._version}")
        try:
            self._checkpoint.write(update)
            self._load(update.version)
        except BaseException:
            self.poison()
            raise
        self._version = self._floor = self._newest = update.version
        self._lost = None
        if update.base_version is None:
            self._poisoned = False

    def advance(self, version: int) -> None:
        """The same weights under the next version number; no pause."""
        with self._controlling:
            self._newest = version  # the server's answers may name it before it has said that it took it
            try:
                self._control.rename(version)
            except EngineError as e:
                self._lose(f"the server could not be told version {version}: {e}")
                self._look_now.set()
            self._version = version

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError(`live_bits`) where what was read back differs from `update`.

        Read back: the file that the server has loaded, and the first rows of some tensors from the server.
        """
        if (name := self._checkpoint.holds(update)) is not None:
            raise WeightUpdateError("live_bits", f"{name} in {self._checkpoint.path} is not what was written")
        names = [p.name for p in update.patches]
        start = update.version % max(1, len(names))
        read = 0
        for name in (names[start:] + names[:start])[: self._verify_tensors]:
            differs = self._control.differs(
                name, self._checkpoint.tensors[name], self._checkpoint.dtype(name)
            )
            if differs:
                raise WeightUpdateError(
                    "live_bits", f"{name}: the server's first rows are not those it was given"
                )
            read += differs is not None
        if names and self._verify_tensors and not read:
            logger.info("version %d: the server reads none of the changed tensors back", update.version)

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of the file that the server has loaded; inside `paused()`, after `apply`."""
        return self._checkpoint.hash()

    def poison(self) -> None:
        """Refuse requests, and fail those in flight, until the next successful `apply` of an anchor.

        The server stays paused until then.
        """
        with self._lock:
            self._poisoned = True
        self._fail_all(EnginePoisonedError("the engine's weights are torn; it will reload an anchor"))

    def close(self) -> None:
        """Fail what is in flight, and end the connection; the server goes on. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._look_now.set()
        self._fail_all(EngineError("the engine is closed"))
        self._connection.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=10)
        self._checkpoint.remove()

    def look(self) -> None:
        """Compare the server's version with ours; one that has lost our weights, as after a restart, gets them again."""
        if not self._controlling.acquire(blocking=False):
            return  # an update is under way
        try:
            if self._closed or self._poisoned or self._version < 0:
                return
            found = self._control.version()
            if self._lost is None and found == str(self._version):
                return
            self._lose(self._lost or f"the server serves version {found!r}, not {self._version}")
            self._heal()
        except EngineError as e:
            logger.warning("server not as expected url=%s: %s", self._connection.url, e)
        finally:
            self._controlling.release()

    def _heal(self) -> None:
        """Load the directory again: it is the complete set of the live version, as an anchor is."""
        self._pause()
        try:
            self._load(self._version)
            self._floor = self._newest = self._version
            self._lost = None
        finally:
            self._resume()
        logger.warning("the server has version %d again url=%s", self._version, self._connection.url)

    def _load(self, version: int) -> None:
        with self._lock:
            self._loads += 1
        self._control.load(self._checkpoint.path, version)

    def _pause(self) -> None:
        try:
            self._control.pause(self._mode)
        except EngineError:
            # It may have stopped all the same, and nobody would start it again.
            with contextlib.suppress(EngineError):
                self._resume()
            raise
        self._settle()

    def _resume(self) -> None:
        if self._poisoned or self._closed or self._lost is not None:
            return
        try:
            self._control.resume()
        except EngineError as e:
            self._lose(f"the server could not be started again: {e}")
            raise

    def _settle(self) -> None:
        """Wait until what was sampled before the pause has arrived, so that it is counted."""
        if not self._stream:
            return
        end = time.monotonic() + LONGEST_SETTLING
        count = -1
        while count != (now := self.generated_tokens) and time.monotonic() < end:
            count = now
            time.sleep(STILL_SECONDS)

    def _watch(self) -> None:
        while not self._closed:
            self._look_now.wait(self._watch_seconds)
            self._look_now.clear()
            if not self._closed:
                self.look()

    def _lose(self, reason: str) -> None:
        logger.error("the engine has lost its server: %s", reason)
        with self._lock:
            self._lost = reason
        self._fail_all(EnginePoisonedError(f"the weights will be loaded again: {reason}"))

    async def _exchange(self, entry: _InFlight) -> GenerateResult:
        """On the connection's loop: one request and its answer."""
        request = entry.request
        body = request_body(
            request,
            rid=entry.rid,
            max_tokens=min(request.max_tokens, self._context - len(request.token_ids)),
            cache_key=f"headrace-{entry.version}",
            stream=self._stream,
        )
        answer = Answer()
        try:
            if self._stream:
                async with contextlib.aclosing(self._connection.events("/generate", body)) as events:
                    async for event in events:
                        answer.take(event)
                        entry.tokens = answer.count
            else:
                answer.take(await self._connection.post("/generate", body))
        except ServerError:
            raise
        except BaseException:
            self._connection.spawn(self._abort(entry.rid))
            raise
        sampled = answer.finish()
        try:
            spans = attribute(sampled, self._lived(entry))
        except ForeignVersionError as e:
            with self._lock:
                self._lost = self._lost or str(e)
            self._look_now.set()
            raise EnginePoisonedError(str(e)) from None
        with self._lock:
            # In this order, so that no token is counted twice.
            self._flight.pop(entry.rid, None)
            self._finished_tokens += len(sampled.token_ids)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            version_spans=spans,
            finish_reason=sampled.finish_reason,
        )

    def _lived(self, entry: _InFlight) -> Lived:
        with self._lock:
            return Lived(
                oldest=entry.floor,
                admitted=entry.version,
                newest=self._newest,
                crossed=entry.loads != self._loads,
                aborting=self._mode == "abort",
            )

    async def _abort(self, rid: str) -> None:
        try:
            await self._connection.control(
                "POST", "/abort_request", {"rid": rid, "abort_all": False}, seconds=5
            )
        except ServerError as e:
            logger.info("abort not delivered rid=%s: %s", rid, e)

    def _admit(self, request: GenerateRequest) -> None:
        size = len(request.token_ids)
        what = f"request {request.request_id}"
        if size == 0 or request.max_tokens < 1 or request.temperature <= 0:
            raise EngineError(f"{what}: needs tokens, max_tokens >= 1, temperature > 0")
        if min(request.token_ids) < 0 or max(request.token_ids) >= self._vocab_size:
            raise EngineError(f"{what}: a token id is not in [0, {self._vocab_size})")
        if request.top_p < 1 or request.top_k > 0:
            raise EngineError(
                f"{what}: SGLang's log-probabilities are those before top-p and top-k, so they would not be of the"
                " distribution that was sampled from; set rollout.top_p = 1 and rollout.top_k = 0"
            )
        if size >= self._context:
            raise EngineError(f"{what}: {size} tokens, the context ends at {self._context}")

    def _refuse(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._poisoned:
            raise EnginePoisonedError("the engine's weights are torn; it will reload an anchor")
        if self._lost is not None:
            raise EnginePoisonedError(f"the weights will be loaded again: {self._lost}")
        if self._version < 0:
            raise EngineError("the engine has no weights yet")

    def _fail_all(self, error: EngineError) -> None:
        for entry in list(self._flight.values()):
            entry.failure = error
            if entry.future is not None:
                entry.future.cancel()
