"""What a rollout worker learns from the log: one plain consumer in a thread, its records applied on the loop.

tasks -> task pool; engines -> engine pool; weights, samples, dead letters -> ledger. Of samples and dead
letters only headers and keys are read. Nothing is committed: all of it is rebuilt from the log at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from ...schemas import topics as t
from ...schemas.codec import header
from ...schemas.config import KafkaConfig
from ...schemas.engine import ENGINE
from ...schemas.errors import InvalidMessageError
from ...schemas.sample import FATE_HEADER, ROLLOUT_HEADER, TRAJECTORY_HEADER, Fate
from ...schemas.task import TASK
from ...schemas.weights import WEIGHTS
from ...schemas.worker import WORKER
from ...streams.consumer_thread import ConsumerThread
from ...streams.kafka import partitions_of, poll_records
from .admission import Ledger
from .engine_pool import EnginePool
from .peers import Peers
from .tasks import TaskPool

logger = logging.getLogger(__name__)


class Intake:
    """Applies records to the worker's state."""

    def __init__(
        self,
        topics: t.Topics,
        policy_id: str,
        *,
        tasks: TaskPool,
        engines: EnginePool,
        ledger: Ledger,
        peers: Peers,
        refuse: Callable[[Any, InvalidMessageError], None],
    ) -> None:
        """`refuse` is told of task records that cannot be used."""
        self._tasks, self._engines, self._ledger, self._refuse = tasks, engines, ledger, refuse
        self._peers = peers
        self._appliers: dict[str, Callable[[Any], None]] = {
            topics.name(t.TASKS): self._task,
            topics.name(t.ENGINES): self._engine,
            topics.name(t.WORKERS): self._worker,
            topics.name(t.WEIGHTS, policy_id): self._weights,
            topics.name(t.SAMPLES, policy_id): self._sample,
            topics.name(t.DEADLETTERS): self._dead_letter,
        }

    def apply(self, records: Sequence[Any]) -> None:
        """Consumer records, in the order in which they were read."""
        for record in records:
            try:
                self._appliers[record.topic](record)
            except InvalidMessageError as e:
                logger.warning(
                    "record left out topic=%s partition=%d offset=%d: %s",
                    record.topic,
                    record.partition,
                    record.offset,
                    e,
                )

    def _task(self, record: Any) -> None:
        if record.value is None:
            self._tasks.remove((record.key or b"").decode("utf-8", "replace"))
            return
        try:
            self._tasks.put(TASK.decode(record.value, record.headers))
        except InvalidMessageError as e:
            self._refuse(record, e)
            raise

    def _engine(self, record: Any) -> None:
        if record.value is None:
            self._engines.remove((record.key or b"").decode("utf-8", "replace"))
        else:
            self._engines.update(ENGINE.decode(record.value, record.headers))

    def _worker(self, record: Any) -> None:
        if record.value is None:
            self._peers.remove((record.key or b"").decode("utf-8", "replace"))
        else:
            self._peers.update(WORKER.decode(record.value, record.headers))

    def _weights(self, record: Any) -> None:
        weights = WEIGHTS.decode(record.value, record.headers)
        self._ledger.trained(weights.version, weights.consumed)

    def _sample(self, record: Any) -> None:
        rollout_id = header(record.headers, ROLLOUT_HEADER) or ""
        self._ledger.sample(
            record.partition,
            record.offset,
            header(record.headers, TRAJECTORY_HEADER) or rollout_id,
            rollout_id,
            admitted=header(record.headers, FATE_HEADER) == Fate.ADMITTED,
        )

    def _dead_letter(self, record: Any) -> None:
        if record.key is not None:
            self._ledger.resolved(record.key.decode("utf-8", "replace"))


class LogReader(ConsumerThread):
    """The thread that reads.

    `deliver` gets each poll's records, `caught_up` is called once when what was on the topics at the start has
    been delivered, `failed` gets what ended the thread early.
    """

    def __init__(
        self,
        config: KafkaConfig,
        topics: t.Topics,
        policy_id: str,
        *,
        client_id: str,
        deliver: Callable[[list[Any]], None],
        caught_up: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(config, name="log-reader", client_id=client_id)
        self._topics, self._policy_id = topics, policy_id
        self._deliver, self._caught_up, self._failed = deliver, caught_up, failed

    def _broke(self, error: Exception) -> None:
        self._failed(error)

    def _read(self, consumer: KafkaConsumer) -> None:
        weights = partitions_of(consumer, self._topics.name(t.WEIGHTS, self._policy_id))
        consumer.assign(weights)
        consumer.seek_to_beginning(*weights)
        consumed = self._consumed(consumer, weights)
        starts = {p: consumer.position(p) for p in weights}
        samples = partitions_of(consumer, self._topics.name(t.SAMPLES, self._policy_id))
        starts |= {p: consumed[p.partition] for p in samples if p.partition in consumed}
        old = [p for p in samples if p not in starts]
        for spec in (t.TASKS, t.ENGINES, t.WORKERS):
            old += partitions_of(consumer, self._topics.name(spec))
        letters = partitions_of(consumer, self._topics.name(t.DEADLETTERS))
        consumer.assign([*starts, *old, *letters])
        consumer.seek_to_beginning(*old)
        consumer.seek_to_end(*letters)
        for partition, offset in starts.items():
            consumer.seek(partition, offset)
        self._read_to_end(consumer, [*starts, *old])
        self._caught_up()
        while not self._stopping.is_set():
            self._poll(consumer)

    def _consumed(self, consumer: KafkaConsumer, weights: list[TopicPartition]) -> dict[int, int]:
        """Read `weights` to its present end; what the newest version has consumed of `samples`."""
        newest = self._read_to_end(consumer, weights)
        if newest is None:
            return {}
        try:
            return dict(WEIGHTS.decode(newest.value, newest.headers).consumed)
        except InvalidMessageError:
            return {}  # the ledger drops what is consumed by itself; this only saves reading

    def _read_to_end(self, consumer: KafkaConsumer, partitions: list[TopicPartition]) -> Any:
        """Read at least to the present end of `partitions`; the last record, None without one."""
        ends = consumer.end_offsets(partitions)
        last = None
        while any(consumer.position(p) < ends[p] for p in partitions) and not self._stopping.is_set():
            records = self._poll(consumer)
            last = records[-1] if records else last
        return last

    def _poll(self, consumer: KafkaConsumer) -> list[Any]:
        records = poll_records(consumer, idle=self._stopping.wait)
        if records:
            self._deliver(records)
        return records
