"""The other end of an engine's HTTP interface: `generate`, with calls made at nearly the same time in one POST."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from dataclasses import replace
from typing import Any

import aiohttp

from ...schemas.errors import EngineError
from . import wire
from .protocol import GenerateRequest, GenerateResult

logger = logging.getLogger(__name__)

MAX_BATCH = 512
CONNECT_SECONDS = 5.0


class HttpEngineClient:
    """Requests to the engine at `url`. Belongs to one event loop; `close` it there."""

    def __init__(self, url: str, *, window_seconds: float = 0.002) -> None:
        """`window_seconds`: how long a call may wait for others to share its POST."""
        self.url = url.rstrip("/")
        self._window = window_seconds
        self._session: aiohttp.ClientSession | None = None
        self._prefix = uuid.uuid4().hex[:12]
        self._count = 0
        self._waiting: list[tuple[str, GenerateRequest]] = []
        self._futures: dict[str, tuple[GenerateRequest, asyncio.Future[GenerateResult]]] = {}
        self._aborted: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._posts: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one turn. Raises EngineError, EnginePoisonedError. Cancelling the task aborts the request."""
        loop = asyncio.get_running_loop()
        self._count += 1
        wire_id = f"{self._prefix}-{self._count}"
        future: asyncio.Future[GenerateResult] = loop.create_future()
        self._futures[wire_id] = (request, future)
        self._waiting.append((wire_id, request))
        self._flush_soon(loop)
        try:
            return await future
        finally:
            if self._futures.pop(wire_id, None) is not None:  # cancelled before an answer came
                self._aborted.append(wire_id)
                self._flush_soon(loop)

    async def info(self) -> dict[str, Any]:
        """What the engine says of itself. Raises EngineError."""
        try:
            async with self._open().get(f"{self.url}/info") as response:
                return await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            raise EngineError(f"the engine at {self.url} does not answer: {e!r}") from None

    async def close(self) -> None:
        """Abort what is in flight and close the connections. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        for wire_id in list(self._futures):
            self._settle(wire_id, EngineError("the client is closed"))
        for post in list(self._posts):
            post.cancel()
        await asyncio.gather(*self._posts, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # A turn may take minutes, so only the connection itself has a time limit.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
            )
        return self._session

    def _flush_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(self._window, self._flush)

    def _flush(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, []
        aborted, self._aborted = self._aborted, []
        gone = set(aborted)
        unsent = {wire_id for wire_id, _ in waiting if wire_id in gone}
        batch = [item for item in waiting if item[0] not in gone]
        for start in range(0, len(batch), MAX_BATCH):
            self._start(self._post(batch[start : start + MAX_BATCH]))
        if sent := [i for i in aborted if i not in unsent]:
            self._start(self._abort(sent))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _post(self, batch: list[tuple[str, GenerateRequest]]) -> None:
        body = wire.dump_requests(batch)
        error = EngineError(f"the engine at {self.url} ended its answer early")
        try:
            async with self._open().post(f"{self.url}/generate", data=body) as response:
                if response.status != 200:
                    error = EngineError(
                        f"the engine at {self.url}: {response.status} {await response.text()}"
                    )
                    return
                rest = b""
                async for piece in response.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        self._take(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            error = EngineError(f"the engine at {self.url} does not answer: {e!r}")
        except EngineError as e:
            error = e
        finally:
            for wire_id, _ in batch:
                self._settle(wire_id, error)

    def _take(self, line: bytes) -> None:
        wire_id, outcome = wire.load_line(line)
        entry = self._futures.get(wire_id)
        if entry is not None and isinstance(outcome, GenerateResult):
            outcome = replace(outcome, request_id=entry[0].request_id)
        self._settle(wire_id, outcome)

    def _settle(self, wire_id: str, outcome: GenerateResult | EngineError) -> None:
        _, future = self._futures.pop(wire_id, (None, None))
        if future is None or future.done():
            return
        if isinstance(outcome, GenerateResult):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)

    async def _abort(self, wire_ids: list[str]) -> None:
        body = json.dumps({"request_ids": wire_ids}).encode()
        try:
            async with self._open().post(f"{self.url}/abort", data=body) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as e:
            logger.info("abort not delivered url=%s error=%r", self.url, e)
