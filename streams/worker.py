"""The streams role: one process with verify, advantage and the gate, its metrics and its watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any

import faust
from aiokafka.errors import IllegalStateError
from faust.exceptions import ConsumerNotStarted

from ..schemas.config import Config
from ..schemas.topics import SCORES, Topics
from . import metrics
from .app import ROLE, StreamsApp, create_app
from .feedback_topics import prepare_feedback_topics
from .kafka import create_topics
from .recall import READ_SECONDS
from .watchdog import Reading, WatchdogThread

logger = logging.getLogger(__name__)

STOP_SECONDS = 15.0
REBALANCE_SECONDS = 60.0
"""A rebalance, or the first assignment, that takes longer is a stall."""
RECOVERY_SECONDS = 30.0
"""A table's recovery that takes no record in this time is a stall (faust#176, #155, #651)."""

Ends = Callable[[list[tuple[str, int]]], dict[tuple[str, int], int]]


def main(config: Config) -> int:
    """Run until SIGTERM or SIGINT (0), a failure (1), or a stall (70). Raises ConfigError, BrokerError."""
    create_topics(config.kafka, Topics(config.run.namespace), [config.policy.id])
    if config.feedback.on:
        prepare_feedback_topics(config.kafka, Topics(config.run.namespace))
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
    slow = app.verify_stage.slow_seconds
    return readings_of_consumer(
        app,
        config.streams.watchdog_seconds,
        ends,
        slow_s=max(slow, READ_SECONDS if app.advantage_stage.preparing else 0.0),
        taken_of=Topics(config.run.namespace).name(SCORES),
        taken=app.advantage_stage.taken,
    )


def readings_of_consumer(
    app: faust.App,
    limit_s: float,
    ends: Ends,
    *,
    slow_s: float = 0.0,
    taken_of: str | None = None,
    taken: Callable[[], dict[int, int]] = dict,
) -> dict[str, Reading]:
    """Readings of any app with the safe consumer: assignment, rebalance, table recovery, every partition.

    Where open groups hold commits back, in the topic `taken_of`, the offsets that were `taken` count, by
    partition; elsewhere the committed ones. One loop hands over all topics, so what it hands over of the others
    counts for `taken_of` too. `slow_s`: how much longer than `limit_s` a record may take at this moment.
    """
    readings = {
        "the first assignment": Reading(0, app._assignment is None, REBALANCE_SECONDS),
        "a rebalance": Reading(app.rebalancing_count, app.rebalancing, REBALANCE_SECONDS),
    }
    try:
        positions: dict[Any, int | None] = app.consumer.committed()
    except (ConsumerNotStarted, IllegalStateError):
        return readings
    recovery = app.tables.recovery
    if recovery.in_recovery:  # the input waits for it
        recovered = sum(offset or 0 for offset in list(recovery.active_offsets.values()))
        return readings | {"the recovery of tables": Reading(recovered, True, RECOVERY_SECONDS)}
    end_of = ends([(tp.topic, tp.partition) for tp in positions]) if positions else {}
    of_partition = taken()
    others = sum(due or 0 for tp, due in app.consumer.delivered().items() if tp.topic != taken_of)
    for tp, committed in positions.items():
        position = moves = committed
        if tp.topic == taken_of:
            position = of_partition.get(tp.partition, committed)
            if position is not None:
                position = app.consumer.past_holes(tp, position)
            moves = (position or 0) + others
        behind = (position or 0) < end_of[tp.topic, tp.partition]
        readings[f"{tp.topic}-{tp.partition}"] = Reading(moves, behind, limit_s + slow_s)
    return readings
