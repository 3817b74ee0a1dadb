"""An engine over HTTP on loopback: batches of requests in, results streamed out as they finish.

POST /pause and /resume are the operator's: between them nothing is sampled, requests wait, and updates are applied.
There is no authentication, hence loopback only. A client that goes away aborts what it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...schemas.errors import ConfigError, EngineError
from . import wire
from .pauses import Pauses
from .protocol import Engine, GenerateRequest

logger = logging.getLogger(__name__)

Info = Callable[[], dict[str, Any]]
"""What GET /info answers."""


class EngineServer:
    """The HTTP interface of one engine; `app` is the ASGI application."""

    def __init__(self, engine: Engine, *, info: Info | None = None, pauses: Pauses | None = None) -> None:
        """`pauses`: the ones that the engine's subscriber takes part in."""
        self._engine = engine
        self._pauses = pauses if pauses is not None else Pauses(engine)
        self._info = info if info is not None else dict
        self._tasks: dict[str, asyncio.Task[bytes]] = {}
        self.app = Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST"]),
                Route("/abort", self._abort, methods=["POST"]),
                Route("/pause", self._pause, methods=["POST"]),
                Route("/resume", self._resume, methods=["POST"]),
                Route("/health", self._health),
                Route("/info", self._describe),
            ]
        )

    async def _generate(self, request: Request) -> Response:
        try:
            requests = wire.load_requests(await request.body())
        except ValueError as e:
            return JSONResponse({"error": str(e)}, status_code=400)
        return _Lines(self._stream(requests))

    async def _stream(self, requests: list[GenerateRequest]) -> AsyncIterator[bytes]:
        """Lines as requests finish, those that are there at once in one piece."""
        ready: list[bytes] = []
        wake = asyncio.Event()

        left = len(requests)

        def finished(task: asyncio.Task[bytes]) -> None:
            nonlocal left
            left -= 1
            if not task.cancelled():
                ready.append(task.result())
            wake.set()

        tasks = []
        for request in requests:
            task = asyncio.create_task(self._run(request))
            task.add_done_callback(finished)
            self._tasks[request.request_id] = task
            tasks.append(task)
        try:
            while ready or left:
                await wake.wait()
                wake.clear()
                lines, ready[:] = b"".join(ready), []
                if lines:
                    yield lines
        finally:
            for request, task in zip(requests, tasks, strict=True):
                task.cancel()
                self._tasks.pop(request.request_id, None)

    async def _run(self, request: GenerateRequest) -> bytes:
        try:
            return wire.dump_result(await self._engine.generate(request))
        except EngineError as e:
            return wire.dump_error(request.request_id, e)
        except Exception as e:
            logger.exception("generate failed request_id=%s", request.request_id)
            return wire.dump_error(request.request_id, EngineError(f"{type(e).__name__}: {e}"))

    async def _abort(self, request: Request) -> Response:
        try:
            ids = [str(i) for i in json.loads(await request.body())["request_ids"]]
        except (ValueError, KeyError, TypeError) as e:
            return JSONResponse({"error": f"not a list of request_ids: {e}"}, status_code=400)
        tasks = [task for i in ids if (task := self._tasks.get(i)) is not None]
        for task in tasks:
            task.cancel()
        return JSONResponse({"aborted": len(tasks)})

    async def _pause(self, request: Request) -> Response:
        return await self._answer_to(self._pauses.hold)

    async def _resume(self, request: Request) -> Response:
        return await self._answer_to(self._pauses.release)

    async def _answer_to(self, act: Callable[[], None]) -> Response:
        """`act` waits for the running step, or for the update in it, so it has a thread of its own."""
        try:
            await asyncio.to_thread(act)
        except EngineError as e:
            return JSONResponse({"error": str(e)}, status_code=503)
        return JSONResponse({"paused": self._pauses.held, "version": self._engine.version})

    async def _health(self, request: Request) -> Response:
        torn = self._info().get("state") == "poisoned"
        healthy = self._engine.alive and self._engine.version >= 0 and not torn
        return JSONResponse(
            {"healthy": healthy, "version": self._engine.version, "paused": self._pauses.held},
            status_code=200 if healthy else 503,
        )

    async def _describe(self, request: Request) -> Response:
        e = self._engine
        facts = {
            "version": e.version,
            "running": e.running,
            "generated_tokens": e.generated_tokens,
            "vocab_size": e.vocab_size,
            "logprobs_mode": e.logprobs_mode,
            "paused": self._pauses.held,
        }
        return JSONResponse({**facts, **self._info()})


class _Lines(Response):
    """Sends pieces as they come, and stops making them when the client goes away."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):  # the client went away
                await sending

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._pieces) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on loopback; port 0 is a free one. Raises ConfigError."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ConfigError(
            f"engine.host is {host!r}: the engine's HTTP interface has no authentication, so it listens on"
            " loopback only; use 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return at_once(socket.create_server((host, port), family=family, backlog=1024))
    except OSError as e:
        raise ConfigError(
            f"engine.port {port} on {host} cannot be used ({e.strerror}); choose another, or 0 for a free one"
        ) from None


def at_once(listening: socket.socket) -> socket.socket:
    """`listening`, whose connections send small pieces at once: asyncio sees to that only for sockets that name their
    protocol, and 40 ms are lost where the head of an answer and its body are two pieces."""
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket) -> str:
    """http://host:port of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the role that runs it decides when it ends (`should_exit`)."""

    def __init__(self, app: Starlette) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                timeout_keep_alive=60,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield
