"""A plain consumer in a thread of its own, for roles whose loop must not wait for a broker."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from ..schemas.config import KafkaConfig
from .kafka import closing, make_consumer

JOIN_SECONDS = 10.0


class ConsumerThread(ABC):
    """Runs `_read` from `start` to `stop`, once."""

    def __init__(self, config: KafkaConfig, *, name: str, client_id: str) -> None:
        self._config, self._client_id = config, client_id
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)

    def _main(self) -> None:
        try:
            with closing(make_consumer(self._config, client_id=self._client_id)) as consumer:
                self._read(consumer)
        except Exception as e:
            self._broke(e)

    @abstractmethod
    def _read(self, consumer: Any) -> None:
        """In the thread: read until `_stopping` is set."""

    @abstractmethod
    def _broke(self, error: Exception) -> None:
        """In the thread: what ended it early."""
