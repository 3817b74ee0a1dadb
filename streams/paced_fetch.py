"""Faust's client, slowed down where a broker answers an empty fetch at once instead of waiting for records.

The embedded broker does; without this an idle worker asks it thousands of times a second. And it reads what is
committed only: Faust would hand out the records of aborted transactions.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread

from . import lenient_records

AT_ONCE_SECONDS = 0.02
PAUSE_SECONDS = 0.03


class PacedConsumerThread(AIOKafkaConsumerThread):
    """Pauses after a fetch that brought nothing and did not wait."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        return consumer

    async def on_start(self) -> None:
        """Start the client and pace its fetches."""
        lenient_records.install()
        await super().on_start()
        fetcher = self._ensure_consumer()._fetcher
        fetch = fetcher._proc_fetch_request

        async def paced_fetch(*args: Any) -> bool:
            started = time.monotonic()
            found: bool = await fetch(*args)
            if not found and time.monotonic() - started < AT_ONCE_SECONDS:
                with contextlib.suppress(asyncio.CancelledError):  # as a fetch that is cancelled: no news
                    await asyncio.sleep(PAUSE_SECONDS)
            return found

        fetcher._proc_fetch_request = paced_fetch
