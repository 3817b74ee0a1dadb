"""Runs reward functions: built-in ones inline, a user's own with a time limit and away from the event loop.

A sync function runs in a daemon thread of its own pool; one that hangs is left behind and its thread replaced.
An async function runs on a second event loop, so that one that blocks does not stop the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ...schemas.errors import RewardError
from .. import metrics
from .base import RewardResult, RolloutView, result_of
from .load import LoadedReward

logger = logging.getLogger(__name__)

MAX_STUCK = 256


class RewardRunner:
    """Calls rewards, at most `concurrency` of a user's own at once."""

    def __init__(self, *, concurrency: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(concurrency)
        self._threads = _Threads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.running = 0
        """Calls of a user's own functions in progress."""
        self._own_limits: list[float] = []
        """Of the calls in progress that keep their own."""

    @property
    def longest_s(self) -> float:
        """The longest time limit of a call in progress that keeps its own, else 0."""
        return max(list(self._own_limits), default=0.0)

    def run_inline(self, reward: LoadedReward, view: RolloutView) -> RewardResult:
        """Call a cheap built-in reward. Raises RewardError."""
        return _checked(reward, lambda: reward.call(view))

    async def run(self, reward: LoadedReward, view: RolloutView) -> RewardResult:
        """Call a user's own reward. Raises RewardError: reward_raised, reward_timeout, reward_not_..."""
        async with self._room:
            self.running += 1
            own = _own_limit(view) if reward.unlimited else 0.0
            self._own_limits.append(own)
            started = time.perf_counter()
            try:
                call = self._call_async if reward.is_async else self._call_in_thread
                limit = None if reward.unlimited else self._timeout_s
                returned = await asyncio.wait_for(call(reward, view), limit)
                return _checked(reward, lambda: returned)
            except TimeoutError:
                raise RewardError(reward.late, f"{reward.name} took over {self._timeout_s} s") from None
            finally:
                self.running -= 1
                self._own_limits.remove(own)
                metrics.reward_seconds.observe(time.perf_counter() - started)

    def close(self) -> None:
        """End the threads that are idle; those in a call end with the process."""
        self._threads.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _call_in_thread(self, reward: LoadedReward, view: RolloutView) -> Any:
        return await self._threads.call(lambda: _call(reward, view))

    async def _call_async(self, reward: LoadedReward, view: RolloutView) -> Any:
        if self._loop is None:
            self._loop = _start_loop()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_await(reward, view), self._loop))


def _own_limit(view: RolloutView) -> float:
    """The argument that limits a reward which keeps its own limit; one that is wrong is refused at once."""
    try:
        return float(view.args.get("timeout_seconds", 0.0))
    except (TypeError, ValueError):
        return 0.0


def _call(reward: LoadedReward, view: RolloutView) -> Any:
    try:
        returned = reward.call(view)
    except RewardError:
        raise
    except Exception as e:
        raise _raised(reward, e) from e
    # A sync function may still hand back a coroutine (a lambda around an async one).
    return asyncio.run(_finish(reward, returned)) if inspect.isawaitable(returned) else returned


async def _await(reward: LoadedReward, view: RolloutView) -> Any:
    try:
        return await reward.call(view)  # type: ignore[misc]
    except RewardError:
        raise
    except Exception as e:
        raise _raised(reward, e) from e


async def _finish(reward: LoadedReward, awaitable: Any) -> Any:
    try:
        return await awaitable
    except Exception as e:
        raise _raised(reward, e) from e


def _checked(reward: LoadedReward, call: Callable[[], Any]) -> RewardResult:
    try:
        return result_of(call())
    except RewardError:
        raise
    except Exception as e:
        raise _raised(reward, e) from e


def _raised(reward: LoadedReward, error: Exception) -> RewardError:
    logger.warning("reward=%s raised: %s: %s", reward.name, type(error).__name__, error)
    return RewardError("reward_raised", f"{reward.name}: {type(error).__name__}: {error}"[:300])


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards-async", daemon=True).start()
    return loop


class _Threads:
    """Daemon threads that take calls; idle ones are used first, one stuck in a call is never waited for."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._lock = threading.Lock()
        self._stuck = 0

    async def call(self, function: Callable[[], Any]) -> Any:
        """The result of `function`. When the caller is cancelled, the thread is left to itself."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        abandoned = threading.Event()

        def job() -> None:
            try:
                outcome, error = function(), None
            except Exception as e:
                outcome, error = None, e
            if abandoned.is_set():
                self._count_stuck(-1)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, future, outcome, error)

        self._take().put(job)
        try:
            return await future
        except asyncio.CancelledError:
            abandoned.set()
            if self._count_stuck(+1) >= MAX_STUCK:
                raise RuntimeError(f"{MAX_STUCK} reward calls never returned") from None
            raise

    def close(self) -> None:
        with self._lock:
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()

    def _count_stuck(self, change: int) -> int:
        with self._lock:
            self._stuck += change
            return self._stuck

    def _take(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(inbox,), name="reward", daemon=True).start()
        return inbox

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := inbox.get()) is not None:
            job()
            with self._lock:
                self._idle.append(inbox)


def _settle(future: asyncio.Future[Any], outcome: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(outcome)
