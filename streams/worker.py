"""The streams role: one process with verify, advantage and the gate, its metrics and its watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any

from aiokafka.errors import IllegalStateError
from faust.exceptions import ConsumerNotStarted

from ..schemas.config import Config
from ..schemas.topics import SCORES, Topics
from . import metrics
from .app import ROLE, StreamsApp, create_app
from .kafka import create_topics
from .watchdog import Reading, WatchdogThread

logger = logging.getLogger(__name__)

STOP_SECONDS = 15.0
REBALANCE_SECONDS = 60.0
"""A rebalance, or the first assignment, that takes longer is a stall."""

Ends = Callable[[list[tuple[str, int]]], dict[tuple[str, int], int]]


def main(config: Config) -> int:
    """Run until SIGTERM or SIGINT (0), a failure (1), or a stall (70). Raises ConfigError, BrokerError."""
    create_topics(config.kafka, Topics(config.run.namespace), [config.policy.id])
    _, port = metrics.serve(config.metrics.host, config.metrics.port)
    logger.info("metrics at port=%d", port)
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    app = create_app(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watchdog = WatchdogThread(config.kafka, lambda ends: readings_of(app, config, ends))
    app.follower.start()
    watchdog.start()
    try:
        await run_until(app, stop)
    finally:
        watchdog.stop()
        metrics.role_up.labels(role=ROLE).set(0)
        await _stop(app)
    if app.crash_reason is not None:
        logger.error("the streams worker broke: %r", app.crash_reason)
        return 1
    return 0


async def run_until(app: StreamsApp, stop: asyncio.Event) -> None:
    """Start `app`; returns when `stop` is set, or when the app or its follower has crashed."""
    starting = asyncio.ensure_future(app.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        return
    starting.result()
    metrics.role_up.labels(role=ROLE).set(1)
    logger.info("the streams worker has started")
    while not stopping.done() and not app.crashed:
        await asyncio.wait({stopping}, timeout=0.5)
        if app.follower.failure is not None:
            await app.crash(app.follower.failure)
    stopping.cancel()


async def _stop(app: StreamsApp) -> None:
    app.verify_stage.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(app.stop(), STOP_SECONDS)
    await asyncio.to_thread(app.follower.stop)


def readings_of(app: StreamsApp, config: Config, ends: Ends) -> dict[str, Reading]:
    """How far the worker is, for the watchdog. Called from its thread."""
    limit = config.streams.watchdog_seconds
    readings = {
        "the first assignment": Reading(0, app._assignment is None, REBALANCE_SECONDS),
        "a rebalance": Reading(app.rebalancing_count, app.rebalancing, REBALANCE_SECONDS),
    }
    try:
        positions: dict[Any, int | None] = app.consumer.committed()
    except (ConsumerNotStarted, IllegalStateError):
        return readings
    scores = Topics(config.run.namespace).name(SCORES)
    taken = app.advantage_stage.taken()
    slow = config.verify.timeout_seconds if app.verify_stage.running else 0.0
    end_of = ends([(tp.topic, tp.partition) for tp in positions]) if positions else {}
    for tp, committed in positions.items():
        end = end_of[tp.topic, tp.partition]
        if tp.topic == scores:  # open groups hold commits back: what was taken counts
            position = taken.get(tp.partition, committed)
            readings[f"{tp.topic}-{tp.partition}"] = Reading(position, (position or 0) < end, limit)
        else:
            readings[f"{tp.topic}-{tp.partition}"] = Reading(committed, (committed or 0) < end, limit + slow)
    return readings
