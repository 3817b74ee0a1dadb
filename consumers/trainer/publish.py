"""A version goes out: its blobs stored (emit.py), then one Kafka transaction with the weight record, the offsets of
the samples that made it, and the dead letters of those that could not be read.

All or nothing: what fails before the commit leaves no record, and the next trainer redoes the step. The
transactional id is the policy's, so a second trainer fences the first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kafka import KafkaProducer, TopicPartition
from kafka.errors import (
    InvalidProducerEpochError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    ProducerFencedError,
)
from kafka.structs import OffsetAndMetadata

from ...schemas import topics as t
from ...schemas.codec import version_headers
from ...schemas.config import KafkaConfig
from ...schemas.deadletter import DeadLetter, dead_letter_record
from ...schemas.errors import BrokerError, BrokerUnreachableError, FencedError, InvalidMessageError
from ...schemas.weights import WEIGHTS, WeightRecord
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.bounded import TRANSACTION_SECONDS, bounded
from ...streams.kafka import make_producer
from .emit import RETRY_SECONDS, Emitter
from .team import Team

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 180.0
"""A broker that was killed is back in its cluster within a quarter of a minute; a machine restarts in minutes."""


class Publisher(Emitter):
    """Publishes the versions of one policy, in order. On rank 0; the others are Emitters."""

    def __init__(
        self,
        producer: KafkaProducer,
        store: BlobStore,
        topics: t.Topics,
        policy_id: str,
        *,
        anchor_every: int,
        team: Team | None = None,
        threads: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`producer`: transactional, `init_transactions` done: see `make_transactional`."""
        super().__init__(store, policy_id, anchor_every=anchor_every, team=team, threads=threads, sleep=sleep)
        self._producer = producer
        self._topic = topics.name(t.WEIGHTS, policy_id)
        self._samples_topic = topics.name(t.SAMPLES, policy_id)
        self._letters_topic = topics.name(t.DEADLETTERS)
        self._group = topics.group("trainer", policy_id)

    def commit(self, record: WeightRecord, refused: Sequence[tuple[Any, InvalidMessageError]] = ()) -> None:
        """Send `record`, its offsets and the dead letters in one transaction. Raises FencedError, BrokerError.

        After a BrokerError it is not known whether the transaction came to its end: only the log tells.
        """
        value = WEIGHTS.encode(record)
        headers = version_headers(WEIGHTS.tag, self._policy_id, record.version, record.version)
        offsets = {
            TopicPartition(self._samples_topic, p): OffsetAndMetadata(o, "", -1) for p, o in record.consumed
        }

        def transaction() -> None:
            self._producer.begin_transaction()
            sent = [self._producer.send(self._topic, value, key=self._policy_id.encode(), headers=headers)]
            sent += [self._send_letter(source, error) for source, error in refused]
            if offsets:
                self._producer.send_offsets_to_transaction(offsets, self._group)
            self._producer.commit_transaction()
            for future in sent:
                future.get(timeout=TRANSACTION_SECONDS)

        try:
            bounded(transaction, limit_s=TRANSACTION_SECONDS, what="the transaction")
        except (ProducerFencedError, InvalidProducerEpochError) as e:
            raise FencedError(
                f"another trainer has taken over policy {self._policy_id!r}; version {record.version} was not published"
            ) from e
        except KafkaError as e:
            raise BrokerError(f"version {record.version} could not be published: {e}") from e
        self.settle()

    def close(self) -> None:
        """Release the client; an open transaction is aborted by the broker."""
        self._producer.close(timeout=5)

    def _send_letter(self, record: Any, error: InvalidMessageError) -> Any:
        letter = DeadLetter(
            stage="trainer",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=error.reason,
            detail=error.detail,
            at_ms=int(time.time() * 1000),
        )
        metrics.dead_letters.labels(stage="trainer").inc()
        key, value, headers = dead_letter_record(record.key, record.value, record.headers, letter)
        return self._producer.send(self._letters_topic, value, key=key, headers=headers)


def make_transactional(
    config: KafkaConfig,
    topics: t.Topics,
    policy_id: str,
    *,
    patience_s: float = PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> KafkaProducer:
    """The policy's producer; from here on every earlier trainer of this policy is fenced, its open transaction aborted.

    Tries for `patience_s` while brokers are away. Raises BrokerError.
    """
    deadline = clock() + patience_s
    while True:
        try:
            return _make_transactional(config, topics.group("trainer", policy_id))
        except (KafkaTimeoutError, KafkaConnectionError, BrokerUnreachableError) as e:
            if clock() > deadline:
                raise BrokerError(f"the trainer's transactions cannot start: {e}") from e
            logger.warning("the trainer's transactions cannot start yet: %s", e)
            pause(RETRY_SECONDS[1])
        except KafkaError as e:
            raise BrokerError(f"the trainer's transactions cannot start: {e}") from e


def _make_transactional(config: KafkaConfig, group: str) -> KafkaProducer:
    producer = make_producer(
        config, client_id=group, transactional_id=group, retry_backoff_ms=5, linger_ms=0, max_block_ms=30_000
    )
    try:
        bounded(producer.init_transactions, limit_s=TRANSACTION_SECONDS, what="the start of transactions")
    except KafkaError:
        producer.close(timeout=1)
        raise
    return producer
