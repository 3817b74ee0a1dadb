"""Finished rollouts: to the spool, then to Kafka; and feedback straight to Kafka."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError

from ...schemas import topics as t
from ...schemas.codec import SCHEMA_HEADER
from ...schemas.config import KafkaConfig
from ...schemas.errors import InvalidMessageError
from ...schemas.feedback import FEEDBACK, Feedback
from ...schemas.trajectory import TRAJECTORY, Trajectory
from ...streams.blobs import BlobStore
from ...streams.claims import check_out
from ...streams.kafka import closing, make_consumer, partitions_of
from ..rollout.publisher import Outgoing, Publisher, aborted_marker
from .errors import busy
from .spool import Spool

logger = logging.getLogger(__name__)

FEEDBACK_SECONDS = 10.0
CLOCK_SLACK_MS = 300_000
"""By which this machine's clock may be ahead of the broker's, where the topic is searched for what was sent before."""


class Delivery:
    """Hands rollouts over. Lives on one event loop."""

    def __init__(self, spool: Spool, publisher: Publisher, *, now_ms: Callable[[], int]) -> None:
        """`publisher` must tell `spool.acknowledged` of each record."""
        self._spool, self._publisher, self._now_ms = spool, publisher, now_ms

    async def publish(self, trajectories: list[Trajectory]) -> None:
        """Returns when they are on disk and on their way. RequestError 503 where the disk refuses."""
        rollout_id = trajectories[0].rollout_id
        if self._spool.waiting(rollout_id):
            return
        try:
            kept = await asyncio.to_thread(self._spool.write, trajectories, now_ms=self._now_ms())
        except InvalidMessageError as e:
            logger.error("a trajectory breaks its own rules rollout=%s: %s", rollout_id, e)
            trajectories[:] = [aborted_marker(trajectories[0], f"invalid_{e.reason}")]
            kept = await asyncio.to_thread(self._spool.write, trajectories, now_ms=self._now_ms())
        except OSError as e:
            logger.error("the spool cannot be written rollout=%s: %s", rollout_id, e)
            raise busy(f"the rollout cannot be kept ({e}); finish it again later", retry_after=5) from None
        self._spool.add(rollout_id, kept)
        await self.send(trajectories)

    async def send(self, trajectories: Iterable[Trajectory]) -> None:
        """Hand to Kafka what is in the spool."""
        for trajectory in trajectories:
            await self._publisher.publish(trajectory)


def acknowledged(spool: Spool) -> Callable[[Outgoing], None]:
    """What a Publisher calls for each record that Kafka has."""
    return lambda out: spool.acknowledged(out.trajectory)


def already_sent(
    config: KafkaConfig, topic: str, store: BlobStore, wanted: Sequence[Trajectory], *, since_ms: int
) -> set[str]:
    """Ids of those trajectories of `wanted` that are in `topic`, searched from `since_ms` on. Raises BrokerError."""
    ids = {w.trajectory_id for w in wanted}
    keys = {w.rollout_id.encode() for w in wanted}
    found: set[str] = set()
    with closing(make_consumer(config, client_id="headrace-gateway-recovery")) as consumer:
        for record in _records(consumer, topic, since_ms - CLOCK_SLACK_MS):
            if record.key not in keys:
                continue
            try:
                value = check_out(record.value, record.headers, store=store)
                found.add(TRAJECTORY.decode(value, record.headers).trajectory_id)
            except InvalidMessageError as e:
                logger.warning("a record cannot be read offset=%d: %s", record.offset, e)
    return found & ids


def _records(consumer: Any, topic: str, since_ms: int) -> Iterator[Any]:
    """Everything in `topic` from a time on, up to its end as of now."""
    partitions = partitions_of(consumer, topic)
    consumer.assign(partitions)
    ends = consumer.end_offsets(partitions)
    begins = consumer.offsets_for_times({p: max(0, since_ms) for p in partitions})
    left = set()
    for p in partitions:
        begin = begins.get(p)
        if begin is not None and begin.offset < ends[p]:
            consumer.seek(p, begin.offset)
            left.add(p)
        else:
            consumer.seek(p, ends[p])
    while left:
        for records in consumer.poll(timeout_ms=100).values():
            yield from records
        left = {p for p in left if consumer.position(p) < ends[p]}


class FeedbackSender:
    """Sends outcomes, keyed by rollout."""

    def __init__(self, producer: KafkaProducer, topics: t.Topics) -> None:
        self._producer, self._topic = producer, topics.name(t.FEEDBACK)

    async def send(self, feedback: Feedback) -> None:
        """Returns when Kafka has it. RequestError 503 where it does not answer: send it again with its key."""
        try:
            await asyncio.to_thread(self._send, feedback)
        except KafkaError as e:
            raise busy(f"the outcome is not delivered ({e}); send it again with the same key") from None

    def _send(self, feedback: Feedback) -> None:
        self._producer.send(
            self._topic,
            key=feedback.rollout_id.encode(),
            value=FEEDBACK.encode(feedback),
            headers=[(SCHEMA_HEADER, FEEDBACK.tag.encode())],
        ).get(FEEDBACK_SECONDS)
