"""The rollout worker: admits groups by capacity, runs their rollouts, publishes what came of each.

    loop       consumes               produces                  waits for              unblocked by
    reader     tasks engines weights  records on the loop       a poll                 stop
               samples deadletters
    admission  tasks, capacity        group_size rollouts       task, engine, clock,   a record read, an
                                                                capacity, concurrency  acknowledgement
    rollout    engine turns           one trajectory            engine, environment    deadline, shutdown
    publisher  trajectories           acknowledged records      Kafka                  the producer's thread

Sampling goes on while weights are updated: the engines see to it that each token carries its version.
On SIGTERM: admit no more -> let rollouts finish for a while -> abort the rest, each with a record -> flush.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError

from ...schemas import topics as t
from ...schemas.codec import SCHEMA_HEADER
from ...schemas.config import Config
from ...schemas.errors import ConfigError, InvalidMessageError
from ...schemas.task import Task
from ...schemas.worker import WORKER
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.kafka import make_producer
from .admission import Ledger
from .clock import ClockCheck
from .crew import Crew
from .engine_pool import EngineClient, EnginePool, RetryRule
from .followers import Intake, LogReader
from .groups import GroupMaker
from .peers import Peers
from .publisher import Outgoing, Publisher, refuse
from .tasks import TaskPool
from .tokenizing import load_tokenizer

logger = logging.getLogger(__name__)

FATE_GRACE_MS = 60_000
"""How long after its group's deadline a rollout's fate may take before admission forgets it."""
DRAIN_SECONDS = 5.0
FLUSH_SECONDS = 10.0
PRODUCER = {"linger_ms": 10, "batch_size": 256 * 1024}
"""Each batch costs a wake-up of the sending thread and a request: with the defaults, one for every two records."""


class RolloutWorker:
    """One worker process's state, on one event loop."""

    def __init__(
        self,
        config: Config,
        worker_id: str,
        *,
        maker: GroupMaker,
        connect: Callable[[str], EngineClient],
        retry: RetryRule = RetryRule(),
    ) -> None:
        """`connect`: an engine's url -> its client."""
        self.config, self.worker_id = config, worker_id
        self.topics = t.Topics(config.run.namespace)
        self.ledger = Ledger(
            max_lag=config.staleness.admitted_lag,
            batch_size=config.trainer.batch_size,
            grace_ms=FATE_GRACE_MS,
        )
        self.engines = EnginePool(config.policy.id, connect, rule=retry)
        self.tasks = TaskPool(config.policy.id, f"{config.run.seed}:{worker_id}")
        self.peers = Peers(worker_id, config.policy.id)
        self.clock = ClockCheck()
        self._maker = maker
        self._incarnation = uuid.uuid4().hex[:8]
        self.groups_opened = 0
        """Groups begun; each has a record for every rollout in the end."""
        self._next_task: Task | None = None
        self._wake = asyncio.Event()
        self._caught_up = False
        self._stopping = False
        self._hurry = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> int:
        """Until `stop`; the exit status: 0, or 1 when trajectories could not be delivered."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: self._fail(context.get("exception") or RuntimeError(context["message"]))
        )
        producer = await asyncio.to_thread(
            make_producer, self.config.kafka, client_id=self.worker_id, **PRODUCER
        )
        topic = self.topics.name(t.TRAJECTORIES)
        for name in (topic, self.topics.name(t.WORKERS)):
            await asyncio.to_thread(producer.partitions_for, name)  # else the first send blocks the loop
        publisher = Publisher(
            producer,
            topic,
            store=BlobStore(self.config.store_uri),
            inline_max=self.config.store.inline_max_bytes,
            done=self._acknowledged,
            now_ms=_now_ms,
        )
        crew = Crew(
            tokenizer=self._maker.tokenizer,
            generate=self.engines.generate,
            publish=publisher.publish,
            failed=self._fail,
            now_ms=_now_ms,
        )
        reader = self._reader(loop, producer)
        reader.start()
        metrics.role_up.labels(role="rollout").set(1)
        try:
            await self._admit(crew, producer)
            await crew.drain(DRAIN_SECONDS, self._hurry)
            missing = await publisher.flush(FLUSH_SECONDS)
        finally:
            metrics.role_up.labels(role="rollout").set(0)
            await crew.close()
            try:
                producer.send(self.topics.name(t.WORKERS), key=self.worker_id.encode(), value=None)
            except KafkaError as e:  # the others forget this worker by themselves, a little later
                logger.warning("the other workers cannot be told: %s", e)
            await asyncio.to_thread(reader.stop)
            await self.engines.close()
            await asyncio.to_thread(producer.close, timeout=FLUSH_SECONDS)
        if self._failure is not None:
            raise self._failure
        return 0 if not missing else 1

    def stop(self) -> None:
        """Begin to end; a second call cuts the wait for running rollouts short."""
        if self._stopping:
            self._hurry.set()
        self._stopping = True
        self._wake.set()

    async def _admit(self, crew: Crew, producer: KafkaProducer) -> None:
        waiting_since = time.monotonic()
        forget_at = 0
        while not self._stopping:
            now = _now_ms()
            if now >= forget_at:
                forget_at = now + 1000
                self._forget(now)
            self._tell_peers(producer, now)
            self._wake.clear()
            if self._may_open(now):
                metrics.admission_waits.inc(time.monotonic() - waiting_since)
                self._open(crew, now)
                await asyncio.sleep(0)
                waiting_since = time.monotonic()
                continue
            try:
                async with asyncio.timeout(0.5):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _may_open(self, now: int) -> bool:
        if not self._caught_up:  # the backlog is not known yet
            return False
        if self._next_task is None:
            self._next_task = self.tasks.next()
        if self._next_task is None or not self.engines.ready:
            return False
        size = self._maker.size(self._next_task)
        running = self.ledger.running
        if running and (self.engines.failing or running + size > self.config.rollout.concurrency):
            return False
        return self.ledger.may_start(size, self.peers.others) and self.clock.may_open(now, running=running)

    def _open(self, crew: Crew, now: int) -> None:
        """Start all rollouts of one group."""
        task, self._next_task = self._next_task, None
        assert task is not None
        group_ms = int(self.config.rollout.group_seconds * 1000)
        group_id = f"{self.worker_id}.{self._incarnation}.{self.groups_opened + 1}"
        try:
            group, environment = self._maker.make(task, group_id, self.clock.deadline_ms(now, group_ms))
        except InvalidMessageError as e:
            logger.error("task cannot be rolled out, left out task=%s: %s", task.task_id, e)
            self.tasks.remove(task.task_id)
            if not len(self.tasks):
                raise ConfigError(f"no task can be rolled out; the last one: {task.task_id}: {e}") from e
            return
        self.groups_opened += 1
        self.ledger.start(group.rollout_id(i) for i in range(group.size))
        metrics.rollouts_running.set(self.ledger.running)
        # A little early, so that the markers of what did not finish close the group before its deadline does.
        early = min(2000, group_ms // 10)
        crew.start(group, environment, seconds=(group_ms - early) / 1000)

    def _acknowledged(self, out: Outgoing) -> None:
        record = out.trajectory
        changed = self.clock.acknowledged(sent_ms=out.sent_ms, acked_ms=out.acked_ms, append_ms=out.append_ms)
        if changed:
            self._tell_clock()
        self.ledger.produced(record.rollout_id, record.group_deadline_ms)
        metrics.clock_skew_seconds.set((self.clock.skew_ms or 0) / 1000)
        metrics.rollouts.labels(status=record.status.value).inc()
        metrics.rollouts_running.set(self.ledger.running)
        metrics.rollout_seconds.observe(max(0.0, (out.acked_ms - record.stamps[0][1]) / 1000))
        self._wake.set()

    def _tell_peers(self, producer: KafkaProducer, now: int) -> None:
        told = self.peers.announcement(self.ledger.outstanding, at_ms=now)
        if told is not None:
            value, headers = WORKER.encode(told), [(SCHEMA_HEADER, WORKER.tag.encode())]
            producer.send(
                self.topics.name(t.WORKERS), key=self.worker_id.encode(), value=value, headers=headers
            )

    def _tell_clock(self) -> None:
        if self.clock.wrong:
            logger.error(
                "this machine's clock is %.1f s off the broker's: no new groups, since every score would be late. "
                "Set the clocks right (NTP).",
                (self.clock.skew_ms or 0) / 1000,
            )
        else:
            logger.warning("this machine's clock agrees with the broker's again")

    def _forget(self, now: int) -> None:
        lost = self.ledger.forget(now - (self.clock.skew_ms or 0))
        if lost:
            metrics.rollouts_forgotten.inc(len(lost))
            logger.warning("rollouts without a fate forgotten count=%d first=%s", len(lost), lost[0])

    def _reader(self, loop: asyncio.AbstractEventLoop, producer: KafkaProducer) -> LogReader:
        letters = self.topics.name(t.DEADLETTERS)
        intake = Intake(
            self.topics,
            self.config.policy.id,
            tasks=self.tasks,
            engines=self.engines,
            ledger=self.ledger,
            peers=self.peers,
            refuse=lambda record, e: refuse(producer, letters, record, e, now_ms=_now_ms()),
        )

        def caught_up(_: None) -> None:
            self._caught_up = True
            self.tasks.begin_at(self.ledger.version)
            self._wake.set()

        def apply(records: list[Any]) -> None:
            intake.apply(records)
            self._wake.set()

        return LogReader(
            self.config.kafka,
            self.topics,
            self.config.policy.id,
            client_id=f"{self.worker_id}-reader",
            deliver=lambda records: _from_thread(loop, apply, records),
            caught_up=lambda: _from_thread(loop, caught_up, None),
            failed=lambda e: _from_thread(loop, self._fail, e),
        )

    def _fail(self, error: BaseException) -> None:
        """What no one handles ends the worker: its supervisor starts another, and the log knows the rest."""
        logger.error("the worker ends", exc_info=error)
        if self._failure is None:
            self._failure = error
        self.stop()
        self._hurry.set()


def main(config: Config, worker_id: str = "rollout-0") -> int:
    """Run one rollout worker until SIGTERM or SIGINT; the exit status. Raises ConfigError, BrokerError."""
    t.checked_name(worker_id, what="worker id")
    metrics.serve(config.metrics.host, config.metrics.port)
    maker = GroupMaker(config.rollout, load_tokenizer(config.policy.model))
    from ..engines.client import HttpEngineClient

    async def serve() -> int:
        worker = RolloutWorker(config, worker_id, maker=maker, connect=HttpEngineClient)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, worker.stop)
        return await worker.run()

    return asyncio.run(serve())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    """Call `function` on the loop, unless it has ended already."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, value)
