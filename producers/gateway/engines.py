"""Learns from the log which engines there are: one plain consumer in a thread, its records applied on the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ...schemas import topics as t
from ...schemas.config import KafkaConfig
from ...schemas.engine import ENGINE
from ...schemas.errors import InvalidMessageError
from ...streams.consumer_thread import ConsumerThread
from ...streams.kafka import partitions_of, poll_records
from ..rollout.engine_pool import EnginePool

logger = logging.getLogger(__name__)


class EngineReader(ConsumerThread):
    """Reads the `engines` topic from its beginning, until `stop`."""

    def __init__(
        self,
        config: KafkaConfig,
        topics: t.Topics,
        pool: EnginePool,
        *,
        client_id: str,
        failed: Callable[[BaseException], None],
    ) -> None:
        """Made on the loop that the pool lives on; `failed` is called there with what ended the thread early."""
        super().__init__(config, name="engine-reader", client_id=client_id)
        self._topic, self._pool, self._failed = topics.name(t.ENGINES), pool, failed
        self._loop = asyncio.get_running_loop()

    def _read(self, consumer: Any) -> None:
        partitions = partitions_of(consumer, self._topic)
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        while not self._stopping.is_set():
            if records := poll_records(consumer, idle=self._stopping.wait):
                self._on_loop(self._apply, records)

    def _broke(self, error: Exception) -> None:
        self._on_loop(self._failed, error)

    def _on_loop(self, function: Callable[[Any], None], value: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)

    def _apply(self, records: list[Any]) -> None:
        for record in records:
            if record.value is None:
                self._pool.remove((record.key or b"").decode("utf-8", "replace"))
                continue
            try:
                self._pool.update(ENGINE.decode(record.value, record.headers))
            except InvalidMessageError as e:
                logger.warning("record left out topic=%s offset=%d: %s", record.topic, record.offset, e)
