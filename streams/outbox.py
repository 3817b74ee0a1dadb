"""What the agents send, straight to Faust's producer: thousands of thin records a second need the short way.

A record that cannot be delivered ends the worker: what it was made from is not acknowledged, so the next
worker makes it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import faust

from ..schemas.codec import Headers
from .broker_clock import BrokerClock

logger = logging.getLogger(__name__)

LOG_APPEND_TIME = 1
"""The timestamp type of topics where the broker's clock counts."""


class Outbox:
    """Sends records and acknowledges events once the records made from them are delivered."""

    def __init__(self, app: faust.App, *, window: int = 512) -> None:
        self._app = app
        self._room = asyncio.Semaphore(window)
        """Bounds what is on its way, so that a slow broker slows the agents down."""
        self.clock = BrokerClock()
        self._known: set[str] = set()
        self._crashing: asyncio.Task[None] | None = None

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        *,
        partition: int | None = None,
    ) -> asyncio.Future[Any]:
        """Hand a record to the producer; the future is its delivery."""
        if topic not in self._known:
            await self._keep_known(topic)
        await self._room.acquire()
        try:
            # The client itself: Faust's own send adds a buffer and a hook that are not used here.
            client = self._app.producer._ensure_producer()
            future = await client.send(topic, value, key=key, partition=partition, headers=headers)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(self._delivered)
        return future

    def after(self, deliveries: Iterable[asyncio.Future[Any]], done: Callable[[], None]) -> None:
        """Call `done` when all `deliveries` have succeeded; never, when one fails."""
        waiting = list(deliveries)
        left = len(waiting)

        def one_done(future: asyncio.Future[Any]) -> None:
            nonlocal left
            if future.cancelled() or future.exception() is not None:
                return
            left -= 1
            if left == 0:
                done()

        if not waiting:
            done()
        for future in waiting:
            future.add_done_callback(one_done)

    def fail(self, error: BaseException) -> None:
        """End the worker because of `error`."""
        if self._crashing is None:
            logger.error("the worker ends: %s: %s", type(error).__name__, error)
            self._crashing = asyncio.get_running_loop().create_task(self._app.crash(error))

    async def _keep_known(self, topic: str) -> None:
        """Name `topic` to the client for good.

        The client starts with the metadata of all topics and shrinks to the named ones at the first new topic:
        a batch for any other one would then wait for ever, and with it every commit.
        """
        await self._app.producer._ensure_producer().client.add_topic(topic)
        self._known.add(topic)

    def _delivered(self, future: asyncio.Future[Any]) -> None:
        self._room.release()
        if not future.cancelled() and (error := future.exception()) is not None:
            self.fail(error)
        elif not future.cancelled() and future.result().timestamp_type == LOG_APPEND_TIME:
            self.clock.note(appended_ms=future.result().timestamp, now_ms=int(time.time() * 1000))
