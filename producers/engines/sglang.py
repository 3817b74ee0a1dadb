"""An SGLang server as an Engine, over HTTP. Contract-tested against a stub (tests/sglang_stub.py), not run on a real one.

Weights: a model directory that this engine keeps patched and the server loads whole while it is paused. Prefixes are
shared inside one set of weights only. Not proven over HTTP: rows that were not read back; the parts of tensor-parallel
ranks; and that with pause mode in_place and overlap scheduling a step whose result was still queued at the pause is
counted for the old version (--disable-overlap-schedule, or retract, avoid the question).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from ...schemas.errors import EngineError, EnginePoisonedError, WeightUpdateError
from ...schemas.update import WeightUpdate
from .protocol import GenerateRequest, GenerateResult
from .sglang_checkpoint import Checkpoint
from .sglang_control import ServerControl
from .sglang_flight import Flights, Live
from .sglang_http import ServerConnection

logger = logging.getLogger(__name__)

PauseMode = Literal["in_place", "retract", "abort"]


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
        self._mode, self._verify_tensors = pause_mode, verify_tensors
        self._live = Live()
        self._poisoned = self._closed = False
        self._lost: str | None = None
        self._pausing = threading.Lock()
        """Held while the server is paused, by an update, an operator or a repair."""
        self._changing = threading.Lock()
        """Held while the server's weights or their name change; an operator's pause leaves it free."""
        self._flights = Flights(
            connection,
            lambda: replace(self._live),
            context=context,
            stream=stream,
            aborting=pause_mode == "abort",
            on_foreign=self._foreign,
        )
        self._look_now, self._watch_seconds = threading.Event(), watch_seconds
        self._watcher = threading.Thread(target=self._watch, name="sglang-watch", daemon=True)
        self._watcher.start()

    @property
    def version(self) -> int:
        """The policy version that the next token is sampled under; -1 before the first weights."""
        return self._live.version

    @property
    def running(self) -> int:
        """Requests in flight."""
        return self._flights.running

    @property
    def generated_tokens(self) -> int:
        """Tokens sampled since the start; without streaming those of finished requests."""
        return self._flights.tokens

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
        return await self._flights.generate(request, self._refuse)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No token is sampled inside the block. EngineError where the server cannot be stopped or started."""
        with self._pausing:
            self._pause()
            try:
                yield
            except BaseException:
                with contextlib.suppress(EngineError):  # it has been logged, and the cause matters more
                    self._resume()
                raise
            self._resume()

    def stage(self, update: WeightUpdate) -> None:
        """Check that `update` fits, and write an anchor's file beside the live one. WeightUpdateError, EngineError."""
        self._check(update)
        self._checkpoint.stage(update)

    def apply(self, update: WeightUpdate) -> None:
        """Write `update`, only inside `paused()`. WeightUpdateError: it does not fit and nothing was written.

        Any other error has poisoned the engine.
        """
        self._check(update)
        with self._changing:
            try:
                self._checkpoint.write(update)
                self._load(update.version)
            except BaseException:
                self.poison()
                raise
            if update.base_version is None:
                self._poisoned = False

    def advance(self, version: int) -> None:
        """The same weights under the next version number; no pause."""
        with self._changing:
            self._live.newest = version
            try:
                self._control.rename(version)
            except EngineError as e:
                self._lose(f"the server could not be told version {version}: {e}")
                self._look_now.set()
            self._live.version = version

    def verify(self, update: WeightUpdate) -> None:
        """WeightUpdateError(`live_bits`) where what was read back differs from `update`.

        Read back: all of it in the file that the server has loaded, and the first rows of some tensors in the server.
        """
        if (name := self._checkpoint.differs(update)) is not None:
            raise WeightUpdateError("live_bits", f"{name} in {self._checkpoint.path} is not what was written")
        names = [p.name for p in update.patches]
        start = update.version % max(1, len(names))
        read = 0
        for name in (names[start:] + names[:start])[: self._verify_tensors]:
            found = self._control.differs(name, self._checkpoint.bits(name), self._checkpoint.dtype(name))
            if found:
                raise WeightUpdateError(
                    "live_bits", f"{name}: its first rows in the server are not those it was given"
                )
            read += found is not None
        if names and self._verify_tensors and not read:
            logger.info("version %d: the server reads none of the tensors back", update.version)

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of the file that the server has loaded; inside `paused()`."""
        return self._checkpoint.hash()

    def poison(self) -> None:
        """Refuse requests, and fail those in flight, until the next successful `apply` of an anchor.

        The server stays paused until then.
        """
        self._poisoned = True
        self._flights.fail_all(EnginePoisonedError("the engine's weights are torn; it will reload an anchor"))

    def close(self) -> None:
        """Fail what is in flight, and end the connection; the server goes on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._look_now.set()
        self._flights.fail_all(EngineError("the engine is closed"))
        self._connection.close()
        self._watcher.join(timeout=10)
        self._checkpoint.remove()

    def look(self) -> None:
        """Compare the server's version with ours; one that has lost our weights, as after a restart, gets them again."""
        if not self._pausing.acquire(blocking=False):
            return  # an update or an operator is at it
        try:
            with self._changing:
                self._compare()
        except EngineError as e:
            logger.warning("the server is not as expected url=%s: %s", self._connection.url, e)
        finally:
            self._pausing.release()

    def _compare(self) -> None:
        if self._closed or self._poisoned or self._live.version < 0:
            return
        found = self._control.version()
        if self._lost is None and found == str(self._live.version):
            return
        self._lose(self._lost or f"the server serves version {found!r}, not {self._live.version}")
        # The directory is the complete set of the live version, as an anchor is.
        self._pause()
        try:
            self._load(self._live.version)
        finally:
            self._resume()
        logger.warning("the server has version %d again url=%s", self._live.version, self._connection.url)

    def _watch(self) -> None:
        while not self._closed:
            self._look_now.wait(self._watch_seconds)
            self._look_now.clear()
            if not self._closed:
                self.look()

    def _check(self, update: WeightUpdate) -> None:
        self._checkpoint.check(update)
        if update.base_version is not None and update.base_version != self._live.version:
            raise WeightUpdateError("base_version", f"{update.base_version} on top of {self._live.version}")

    def _load(self, version: int) -> None:
        self._live.loads += 1
        self._control.load(self._checkpoint.path, version)
        self._live.floor = self._live.newest = self._live.version = version
        self._lost = None

    def _pause(self) -> None:
        self._flights.hold()
        try:
            self._control.pause(self._mode)
        except EngineError:
            # It may have stopped all the same, and nobody would start it again.
            with contextlib.suppress(EngineError):
                self._resume()
            raise
        self._flights.settle()

    def _resume(self) -> None:
        if self._poisoned or self._closed or self._lost is not None:
            return  # it must not sample: what it has is not ours
        try:
            self._control.resume()
        except EngineError as e:
            self._lose(f"the server could not be started again: {e}")
            self._look_now.set()
            raise
        self._flights.release()

    def _lose(self, reason: str) -> None:
        logger.error("the server has lost our weights: %s", reason)
        self._lost = reason
        self._flights.fail_all(EnginePoisonedError(f"the weights will be loaded again: {reason}"))

    def _foreign(self, reason: str) -> None:
        """From the connection's thread: the watcher does the rest."""
        self._lost = self._lost or reason
        self._look_now.set()

    def _admit(self, request: GenerateRequest) -> None:
        size, what = len(request.token_ids), f"request {request.request_id}"
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
        if self._live.version < 0:
            raise EngineError("the engine has no weights yet")
