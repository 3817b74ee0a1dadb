"""A worker that owns records to read and moves none ends itself: what it knows is in the log, so a new one
takes over where it stood. Always safe, and the cure for every stall that nobody has understood yet.

`Watchdog` is the rule, with the time passed in; `WatchdogThread` asks the broker for the ends and the app for
its positions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaError

from ..schemas.config import KafkaConfig
from .kafka import closing, make_consumer

logger = logging.getLogger(__name__)

EXIT_STATUS = 70
CHECK_SECONDS = 2.0
FROZEN_SECONDS = 10.0
"""Checks further apart than this mean that the whole process stood still: its clock starts anew."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far one thing is."""

    position: int | None
    """Anything that changes when it moves."""
    behind: bool
    """There is work to do."""
    limit_s: float


class Watchdog:
    """Finds what is behind and has not moved for its limit."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[int | None, float]] = {}
        self._last: float | None = None

    def stalled(self, now: float, readings: Mapping[str, Reading]) -> list[str]:
        """Names in `readings` that are stalled at monotonic time `now`; what is not named is forgotten."""
        if self._last is not None and now - self._last > FROZEN_SECONDS:
            self._moved.clear()
        self._last = now
        found = []
        moved = {}
        for name, reading in readings.items():
            position, since = self._moved.get(name, (reading.position, now))
            if not reading.behind or reading.position != position:
                since = now
            moved[name] = (reading.position, since)
            if now - since >= reading.limit_s:
                found.append(name)
        self._moved = moved
        return found


class WatchdogThread:
    """Checks every two seconds, and ends the process when something is stalled."""

    def __init__(
        self,
        config: KafkaConfig,
        read: Callable[[Callable[[list[tuple[str, int]]], dict[tuple[str, int], int]]], dict[str, Reading]],
        *,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        """`read` gets a function from (topic, partition) pairs to their ends at the broker."""
        self._config, self._read, self._end = config, read, end
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """No more checks. Idempotent."""
        self._stop.set()

    def _run(self) -> None:
        rule = Watchdog()
        while not self._stop.is_set():
            try:
                with closing(make_consumer(self._config, client_id="headrace-watchdog")) as consumer:
                    self._check_until_stopped(rule, consumer)
            except Exception as e:  # a broker that is away is no stall of ours
                logger.warning("the watchdog cannot ask the broker: %s: %s", type(e).__name__, e)
                self._stop.wait(CHECK_SECONDS)

    def _check_until_stopped(self, rule: Watchdog, consumer: Any) -> None:
        def ends(pairs: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
            found = consumer.end_offsets([TopicPartition(t, p) for t, p in pairs])
            return {(tp.topic, tp.partition): end for tp, end in found.items()}

        while not self._stop.wait(CHECK_SECONDS):
            try:
                readings = self._read(ends)
            except KafkaError as e:
                logger.warning("the watchdog got no answer from the broker: %s", e)
                continue
            stalled = rule.stalled(time.monotonic(), readings)
            if stalled and not self._stop.is_set():
                logger.critical("no record moves, this worker ends itself: %s", ", ".join(stalled))
                logging.shutdown()
                self._end(EXIT_STATUS)
                return
