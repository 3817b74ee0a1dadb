"""A version goes out: delta (and anchor) encoded, blobs stored, then one Kafka transaction with the weight record,
the offsets of the samples that made it, and the dead letters of those that could not be read.

All or nothing: what fails before the commit leaves no record, and the next trainer redoes the step. The
transactional id is the policy's, so a second trainer fences the first.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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
from ...schemas.delta import encode_anchor, encode_delta
from ...schemas.errors import (
    BlobError,
    BrokerError,
    BrokerUnreachableError,
    FencedError,
    InvalidMessageError,
)
from ...schemas.weight_hash import set_hash, tensor_hashes
from ...schemas.weights import WEIGHTS, BlobKind, WeightBlob, WeightRecord
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.bounded import TRANSACTION_SECONDS, bounded
from ...streams.kafka import make_producer

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 180.0
"""A broker that was killed is back in its cluster within a quarter of a minute; a machine restarts in minutes."""
RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)
"""Pauses between attempts to store a blob."""


class Publisher:
    """Publishes the versions of one policy, in order."""

    def __init__(
        self,
        producer: KafkaProducer,
        store: BlobStore,
        topics: t.Topics,
        policy_id: str,
        *,
        anchor_every: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`producer`: transactional, `init_transactions` done: see `make_transactional`."""
        self._producer, self._store, self._policy_id = producer, store, policy_id
        self._topic = topics.name(t.WEIGHTS, policy_id)
        self._samples_topic = topics.name(t.SAMPLES, policy_id)
        self._letters_topic = topics.name(t.DEADLETTERS)
        self._group = topics.group("trainer", policy_id)
        self._anchor_every, self._sleep = anchor_every, sleep
        self._version = -1
        self._bits: dict[str, np.ndarray] = {}
        self._hashes: dict[str, int] = {}

    def stand_at(self, version: int, bits: dict[str, np.ndarray]) -> None:
        """The log's newest version is `version`, with `bits`: the next delta goes on top of it."""
        self._version, self._bits, self._hashes = version, bits, tensor_hashes(bits)

    @property
    def weights_hash(self) -> int:
        """Of the newest version."""
        return set_hash(self._bits, self._hashes)

    def encode(self, bits: dict[str, np.ndarray], *, anchor: bool = False) -> WeightRecord:
        """The next version's record with its blobs stored, not yet sent. Raises BlobError.

        The first version is an anchor; every `anchor_every`-th has one beside its delta; `anchor`: only an anchor.
        """
        version = self._version + 1
        blobs: list[WeightBlob] = []
        total = sum(b.size for b in bits.values())
        base: dict[str, Any] = {"base_version": None, "base_hash": None, "changed_elements": total}
        if version == 0 or anchor:
            self._hashes = tensor_hashes(bits)
            weights_hash = set_hash(bits, self._hashes)
        else:
            delta = encode_delta(
                self._bits, bits, base_version=self._version, version=version, base_hashes=self._hashes
            )
            self._hashes, weights_hash = dict(delta.hashes), delta.weights_hash
            base = {
                "base_version": self._version,
                "base_hash": delta.base_hash,
                "changed_elements": delta.changed,
            }
            blobs.append(self.put(BlobKind.DELTA, version, delta.blob))
            metrics.delta_bytes.inc(len(delta.blob))
        if version % self._anchor_every == 0 or anchor:
            blobs.append(self.put(BlobKind.ANCHOR, version, encode_anchor(bits, version, weights_hash)))
        self._version, self._bits = version, bits
        return WeightRecord(
            policy_id=self._policy_id,
            version=version,
            weights_hash=weights_hash,
            blobs=tuple(blobs),
            total_elements=total,
            full_bytes=2 * total,
            created_ms=int(time.time() * 1000),
            **base,
        )

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

    def close(self) -> None:
        """Release the client; an open transaction is aborted by the broker."""
        self._producer.close(timeout=5)

    def put(self, kind: BlobKind, version: int, data: bytes) -> WeightBlob:
        """Store one blob of `version`. Raises BlobError."""
        digest = hashlib.sha256(data).hexdigest()
        name = f"weights/{self._policy_id}/v{version:06d}-{kind}-{digest[:8]}"
        for pause in (*RETRY_SECONDS, None):
            try:
                ref = self._store.put(name, data)
                return WeightBlob(kind=kind, uri=ref.name, size=ref.size, sha256=ref.sha256)
            except BlobError as e:
                if pause is None:
                    raise
                logger.warning("blob %s not stored, again in %.1f s: %s", name, pause, e)
                self._sleep(pause)
        raise AssertionError("unreachable")

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
