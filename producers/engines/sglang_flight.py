"""Requests in flight at a server: each is sent, counted as its tokens come, attributed to versions, or failed from outside.

`generate` runs on any event loop; the exchange itself runs on the connection's, in the connection's thread.
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
from collections.abc import Callable
from dataclasses import dataclass

from ...schemas.errors import EngineError, EnginePoisonedError
from .protocol import GenerateRequest, GenerateResult
from .sglang_http import ServerConnection, ServerError
from .sglang_spans import ForeignVersionError, Lived, attribute
from .sglang_wire import Answer, request_body

logger = logging.getLogger(__name__)

ABORT_SECONDS = 5.0
STILL_SECONDS = 0.02
LONGEST_SETTLING = 1.0


@dataclass(slots=True)
class Live:
    """What the server has, as far as this engine knows."""

    version: int = -1
    floor: int = -1
    """The oldest version with the same weights."""
    newest: int = -1
    """The newest version that the server may name: it is told before it says that it has heard."""
    loads: int = 0
    """Loads of weights that have begun."""


@dataclass(slots=True, eq=False)
class _InFlight:
    request: GenerateRequest
    rid: str
    sent: Live
    """As of when it was sent; until then, as of when it came."""
    tokens: int = 0
    failure: EngineError | None = None
    future: concurrent.futures.Future[GenerateResult] | None = None


class Flights:
    """The requests of one engine."""

    def __init__(
        self,
        connection: ServerConnection,
        live: Callable[[], Live],
        *,
        context: int,
        stream: bool,
        aborting: bool,
        on_foreign: Callable[[str], None],
    ) -> None:
        """`live`: a snapshot. `aborting`: pauses end every request. `on_foreign`: told of weights that are not ours."""
        self._connection, self._live = connection, live
        self._context, self._stream, self._aborting = context, stream, aborting
        self._on_foreign = on_foreign
        self._entries: dict[str, _InFlight] = {}
        self._lock = threading.Lock()
        self._prefix, self._ids = uuid.uuid4().hex[:12], itertools.count()
        self._finished_tokens = 0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def running(self) -> int:
        """How many."""
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Sampled since the start; without streaming only those of finished requests."""
        with self._lock:
            return self._finished_tokens + sum(entry.tokens for entry in self._entries.values())

    async def generate(self, request: GenerateRequest, refuse: Callable[[], None]) -> GenerateResult:
        """Send `request`, unless `refuse` raises, and wait for its answer. Raises EngineError."""
        rid = f"{self._prefix}-{next(self._ids)}"
        with self._lock:
            entry = self._entries[rid] = _InFlight(request, rid, self._live())
        try:
            # After it is entered: whoever fails requests from now on finds this one.
            refuse()
            entry.future = self._connection.submit(self._exchange(entry))
            if entry.failure is not None:
                entry.future.cancel()
            return await asyncio.wrap_future(entry.future)
        except asyncio.CancelledError:
            if entry.failure is not None:
                raise entry.failure from None
            raise
        finally:
            with self._lock:
                self._entries.pop(rid, None)

    def hold(self) -> None:
        """Requests that come from now on wait here: at a paused server they would keep the old weights' cache key."""
        self._connection.soon(self._open.clear)

    def release(self) -> None:
        """Those that wait are sent, as of now."""
        self._connection.soon(self._open.set)

    def fail_all(self, error: EngineError) -> None:
        """Every request raises `error`, and is ended at the server."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            entry.failure = error
            if entry.future is not None:
                entry.future.cancel()

    def settle(self) -> None:
        """Wait until what was sampled before a pause has arrived and is counted; without streaming there is none."""
        end = time.monotonic() + LONGEST_SETTLING
        count = -1
        while self._stream and count != (now := self.tokens) and time.monotonic() < end:
            count = now
            time.sleep(STILL_SECONDS)

    async def _exchange(self, entry: _InFlight) -> GenerateResult:
        """On the connection's loop: one request and its answer."""
        await self._open.wait()
        entry.sent = self._live()
        answer = await self._ask(entry)
        sampled = answer.finish()
        try:
            spans = attribute(sampled, self._lived(entry))
        except ForeignVersionError as e:
            self._on_foreign(str(e))
            raise EnginePoisonedError(str(e)) from None
        with self._lock:
            self._entries.pop(entry.rid, None)
            self._finished_tokens += len(sampled.token_ids)
        return GenerateResult(
            request_id=entry.request.request_id,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            version_spans=spans,
            finish_reason=sampled.finish_reason,
        )

    async def _ask(self, entry: _InFlight) -> Answer:
        body = request_body(
            entry.request,
            rid=entry.rid,
            max_tokens=min(entry.request.max_tokens, self._context - len(entry.request.token_ids)),
            cache_key=f"{self._prefix}-{entry.sent.loads}",
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
            raise  # the server has ended it, or is not there to be told
        except BaseException:
            self._connection.spawn(self._abort(entry.rid))
            raise
        return answer

    def _lived(self, entry: _InFlight) -> Lived:
        now = self._live()
        return Lived(
            oldest=entry.sent.floor,
            admitted=entry.sent.version,
            newest=now.newest,
            crossed=entry.sent.loads != now.loads,
            aborting=self._aborting,
        )

    async def _abort(self, rid: str) -> None:
        body = {"rid": rid, "abort_all": False}
        try:
            await self._connection.control("POST", "/abort_request", body, seconds=ABORT_SECONDS)
        except ServerError as e:
            logger.info("abort not delivered rid=%s: %s", rid, e)
