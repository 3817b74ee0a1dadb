"""Calls into the environment of one rollout: a user's own with a time limit, and where they block nobody.

A sync method runs in a daemon thread that belongs to this environment alone (so that what is bound to a thread,
such as an SQLite connection, works), an async one on the event loop. An environment is built where its `step`
runs. A thread that hangs is left behind and ends with the process. Built-in environments are called directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ...schemas.task import Task
from .base import Environment, Observation, settled

logger = logging.getLogger(__name__)

MAX_STUCK = 256
"""Threads left behind in a call, over which no further one is started."""

_left: set[threading.Thread] = set()


class EnvironmentTimeout(Exception):
    """A call took longer than it may."""


class EnvironmentCalls:
    """Builds, drives and closes one environment. What it raises comes through; EnvironmentTimeout is ours."""

    def __init__(self, factory: Callable[[], Environment], *, seconds: float) -> None:
        self._factory, self._seconds = factory, seconds
        target = factory.func if isinstance(factory, functools.partial) else factory
        self._direct = getattr(target, "__module__", "").startswith(f"{__package__}.")
        """Built in: cheap, and never blocks."""
        self._on_loop = self._direct or _is_async(getattr(target, "step", None))
        self._environment: Environment | None = None
        self._thread: _CallThread | None = None

    @property
    def stop_reason(self) -> str | None:
        """The environment's word on why the episode is over."""
        return getattr(self._environment, "stop_reason", None)

    async def build(self) -> None:
        """Make the environment. Call first, once."""
        if self._direct:
            self._environment = self._factory()
        else:
            await self._limited("the constructor", self._build, on_loop=self._on_loop)

    async def start(self, task: Task) -> Observation | None:
        """`Environment.start`."""
        return await self._call("start", task)

    async def step(self, text: str, token_ids: Sequence[int]) -> Observation | None:
        """`Environment.step`."""
        return await self._call("step", text, token_ids)

    async def close(self) -> None:
        """`Environment.close` where there is one; an error is logged. Behind a call that hangs it is not awaited."""
        thread = self._thread
        try:
            if (
                thread is not None
                and thread.busy
                and not _is_async(getattr(self._environment, "close", None))
            ):
                thread.post(self._close_late)
            elif getattr(self._environment, "close", None) is not None:
                await self._call("close")
        except Exception:
            logger.exception("an environment could not be closed")
        finally:
            if thread is not None:
                thread.end()

    def _build(self) -> None:
        self._environment = self._factory()

    def _close_late(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None and not _is_async(close):
            close()

    async def _call(self, name: str, *args: Any) -> Any:
        method = getattr(self._environment, name)
        if self._direct:
            return await settled(method(*args))
        return await self._limited(name, functools.partial(method, *args), on_loop=_is_async(method))

    async def _limited(self, what: str, function: Callable[[], Any], *, on_loop: bool) -> Any:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                return await settled(function() if on_loop else await self._in_thread(function))
        except TimeoutError:
            if not limit.expired():  # the environment's own
                raise
            raise EnvironmentTimeout(f"{what} of the environment took over {self._seconds:g} s") from None

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = _CallThread()
        return await self._thread.call(function)


class _CallThread:
    """A daemon thread that takes calls one after another."""

    def __init__(self) -> None:
        _left.difference_update([thread for thread in _left if not thread.is_alive()])
        if len(_left) >= MAX_STUCK:
            raise RuntimeError(
                f"{len(_left)} calls of environments never returned: no further one is started"
            )
        self.busy = False
        """A call has not returned yet."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="environment", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Awaitable[Any]:
        """The result of `function`. When the caller is cancelled, the call goes on unheard."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def job() -> None:
            outcome, error = None, None
            try:
                outcome = function()
            except Exception as e:
                # A future refuses StopIteration.
                error = RuntimeError("StopIteration") if isinstance(e, StopIteration) else e
            except BaseException as e:  # sys.exit() in the user's code ends the rollout, not its thread
                error = RuntimeError(f"{type(e).__name__}: {e}")
            self.busy = False
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, outcome, error)

        self.busy = True
        self._inbox.put(job)
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` after the calls before it; nobody waits, an error is logged."""

        def job() -> None:
            try:
                function()
            except Exception:
                logger.exception("an environment could not be closed")

        self._inbox.put(job)

    def end(self) -> None:
        """Let the thread end after what it was given."""
        self._inbox.put(None)
        if self.busy:
            _left.add(self._thread)

    def _work(self) -> None:
        while (job := self._inbox.get()) is not None:
            job()


def _settle(future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)
