"""The broker's side of an engine: reads the weights topic, writes the engine's status."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from kafka.errors import KafkaError

from ...schemas.codec import POLICY_HEADER, SCHEMA_HEADER
from ...schemas.config import Config
from ...schemas.deadletter import DeadLetter, dead_letter_headers
from ...schemas.engine import ENGINE, EngineStatus
from ...schemas.errors import InvalidMessageError
from ...schemas.topics import DEADLETTERS, ENGINES, WEIGHTS, Topics
from ...schemas.weights import WEIGHTS as WEIGHTS_RECORD
from ...schemas.weights import WeightRecord
from ...streams import metrics
from ...streams.kafka import make_consumer, make_producer, partitions_of, poll_records

logger = logging.getLogger(__name__)

STAGE = "engine"
IDLE_SECONDS = 0.03
SILENT_SECONDS = 2.0


class StatusProducer:
    """Writes to `engines` and `deadletters`; a broker that is away costs a warning, never the engine."""

    def __init__(self, config: Config, engine_id: str) -> None:
        topics = Topics(config.run.namespace)
        self._engines, self._dead_letters = topics.name(ENGINES), topics.name(DEADLETTERS)
        self._producer = make_producer(config.kafka, client_id=f"{engine_id}-status", max_block_ms=5000)

    def publish(self, status: EngineStatus) -> None:
        """Send one status, without waiting for the broker."""
        headers = [(SCHEMA_HEADER, ENGINE.tag.encode()), (POLICY_HEADER, status.policy_id.encode())]
        self._send(self._engines, status.engine_id.encode(), ENGINE.encode(status), headers)

    def refuse(self, record: Any, error: InvalidMessageError) -> None:
        """Send a record that cannot be used to the dead letters."""
        letter = DeadLetter(
            stage=STAGE,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=error.reason,
            detail=error.detail,
            at_ms=int(time.time() * 1000),
        )
        metrics.dead_letters.labels(stage=STAGE).inc()
        logger.warning("dead letter topic=%s offset=%d: %s", record.topic, record.offset, error)
        self._send(self._dead_letters, record.key, record.value, dead_letter_headers(record.headers, letter))

    def close(self) -> None:
        """Send what is queued and disconnect."""
        try:
            self._producer.flush(timeout=5)
        except KafkaError as e:
            logger.warning("status not delivered: %s", e)
        self._producer.close(timeout=5)

    def _send(self, topic: str, key: bytes | None, value: bytes | None, headers: Any) -> None:
        try:
            sent = self._producer.send(topic, key=key, value=value, headers=headers)
            sent.add_errback(lambda e: logger.warning("not delivered topic=%s: %s", topic, e))
        except KafkaError as e:
            logger.warning("not sent topic=%s: %s", topic, e)


class WeightsFeed:
    """The records of one policy's weights topic, from its beginning."""

    def __init__(self, config: Config, engine_id: str, status: StatusProducer) -> None:
        """Raises BrokerError where there is no such topic."""
        self._status = status
        self._consumer = make_consumer(config.kafka, client_id=f"{engine_id}-weights")
        name = Topics(config.run.namespace).name(WEIGHTS, config.policy.id)
        self._partition = partitions_of(self._consumer, name)[0]
        self._consumer.assign([self._partition])
        self._consumer.seek_to_beginning(self._partition)

    def backlog(self) -> Iterator[list[WeightRecord]]:
        """What is there already, so that an engine that joins late loads one anchor and not every version."""
        end = self._consumer.end_offsets([self._partition])[self._partition]
        # The last offsets may be a transaction's markers, which no read returns and some brokers never pass.
        silent_since = time.monotonic()
        while self._consumer.position(self._partition) < end:
            records = self.poll()
            if records:
                silent_since = time.monotonic()
                yield records
            elif time.monotonic() - silent_since > SILENT_SECONDS:
                return

    def rewind(self) -> None:
        """Read the topic from its beginning again: what is known already changes nothing."""
        self._consumer.seek_to_beginning(self._partition)

    def poll(self) -> list[WeightRecord]:
        """What has arrived; where nothing has, this takes IDLE_SECONDS."""
        decoded = []
        for record in poll_records(self._consumer, idle_seconds=IDLE_SECONDS):
            try:
                decoded.append(WEIGHTS_RECORD.decode(record.value, record.headers))
            except InvalidMessageError as e:
                self._status.refuse(record, e)
        return decoded

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()
