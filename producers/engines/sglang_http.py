"""The connection to a server: requests and control calls on an event loop of its own, in one thread.

So engine code may call from any loop and any thread. Keys travel in a header only, never in a message or a log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from ...schemas.errors import EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.1
ABORT_SECONDS = 2.0
MAX_DETAIL = 400
"""Characters of a server's answer that an error repeats."""


class ServerError(EngineError):
    """The server refused, or did not answer. `status`: of HTTP; None where there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """True where asking again may help."""
        return self.status in (None, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Keys:
    """Bearer keys: for requests, and for control calls where those have another."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    def header(self, *, admin: bool) -> dict[str, str]:
        """The Authorization header, or none."""
        key = (self.admin or self.api) if admin else self.api
        return {"Authorization": f"Bearer {key}"} if key else {}

    def hidden(self, text: str) -> str:
        """`text` without a key that a server or a proxy repeats."""
        for key in (self.api, self.admin):
            text = text.replace(key, "***") if key else text
        return text


class ServerConnection:
    """JSON to and from `url`. `close` ends the thread."""

    def __init__(self, url: str, keys: Keys | None = None) -> None:
        self.url = url
        self._keys = keys if keys is not None else Keys()
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sglang-http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once closed."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the connection's loop; cancelling the future cancels it. EngineError once closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise EngineError("the engine is closed") from None

    def soon(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the connection's loop, before whatever is asked of it later; never once closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` and forget it; on the connection's loop only."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float, attempts: int = 1
    ) -> Any:
        """One control call from any other thread; again, up to `attempts`, while the server is away. ServerError."""
        asked = self.submit(self.control(method, path, body, seconds=seconds, attempts=attempts))
        try:
            return asked.result(timeout=attempts * (seconds + 2 * CONNECT_SECONDS))
        except (concurrent.futures.CancelledError, TimeoutError):
            raise EngineError("the engine is closed") from None

    async def control(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float, attempts: int = 1
    ) -> Any:
        """As `call`, on the connection's loop."""
        for attempt in range(1, attempts + 1):
            try:
                async with self._ask(method, path, body, seconds=seconds, admin=True) as answer:
                    return await _json(answer, f"{self.url}{path}")
            except ServerError as e:
                if attempt == attempts or not e.passing:
                    raise
                logger.info("asking again attempt=%d: %s", attempt, e)
            await asyncio.sleep(FIRST_BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("attempts is at least 1")

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer, however long it takes. ServerError."""
        async with self._ask("POST", path, body) as answer:
            return await _json(answer, f"{self.url}{path}")

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of the answer, without the last `[DONE]`. ServerError."""
        async with self._ask("POST", path, body) as answer:
            rest = b""
            async for piece in answer.content.iter_any():
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    data = line.strip().removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        yield _event(data, f"{self.url}{path}")
            raise ServerError(f"{self.url}{path} ended its answer early")

    def close(self) -> None:
        """End what runs and the thread. Idempotent."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)

    @contextlib.asynccontextmanager
    async def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        seconds: float | None = None,
        admin: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer with status 200; everything else that comes of it is a ServerError."""
        where = f"{self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        headers = self._keys.header(admin=admin)
        try:
            async with self._open().request(
                method, where, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status in (401, 403):
                    raise ServerError(
                        f"{where} refuses our key ({answer.status}): {_KEY_HINT}", answer.status
                    )
                if answer.status != 200:
                    detail = self._keys.hidden(_detail(await answer.read()))
                    raise ServerError(f"{where} answered {answer.status}: {detail}", answer.status)
                yield answer
        except TimeoutError:
            limit = f"within {seconds:g} s" if seconds is not None else "in time"
            raise ServerError(f"{where} did not answer {limit}") from None
        except (aiohttp.ClientError, OSError) as e:
            # Not its repr: that may hold the request's headers.
            raise ServerError(f"{where} does not answer: {type(e).__name__} {e}") from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        """What is asked ends at once; the aborts that this spawns get a moment."""
        asked = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=ABORT_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._session is not None:
            await self._session.close()


_KEY_HINT = "set engine.sglang.api_key_env (and admin_key_env where the server has --admin-api-key)"


async def _json(answer: aiohttp.ClientResponse, where: str) -> Any:
    raw = await answer.read()
    try:
        return json.loads(raw) if raw.strip() else None
    except ValueError:
        raise ServerError(f"{where} answered something that is not JSON: {_detail(raw)}", 200) from None


def _event(data: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise ServerError(f"{where} sent an event that is not JSON: {_detail(data)}", 200) from None
    if not isinstance(event, dict) or "error" in event:
        raise ServerError(f"{where} broke off: {_detail(data)}", 200)
    return event


def _detail(raw: bytes) -> str:
    """What an answer says went wrong: SGLang has it under `message`, or under `error`, or as text."""
    text = raw.decode(errors="replace").strip()
    try:
        tree = json.loads(text)
    except ValueError:
        return text[:MAX_DETAIL] or "nothing"
    for key in ("error", "message", "detail"):
        if isinstance(tree, dict) and key in tree:
            tree = tree[key]
    return (tree if isinstance(tree, str) else json.dumps(tree))[:MAX_DETAIL]
