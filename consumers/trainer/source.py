"""The samples topic -> batches: one consumer, every partition assigned by hand, nothing committed here.

The offsets are committed in the transaction that publishes the weights they made. A record that cannot be
decoded is passed over and handed to `refused`, which goes out as a dead letter in that same transaction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from ...schemas.codec import header
from ...schemas.errors import BrokerError, InvalidMessageError
from ...schemas.sample import SAMPLE, TRAJECTORY_HEADER
from ...streams import metrics
from ...streams.kafka import partitions_of, poll_records
from .builder import REMEMBERED, Batch, BatchBuilder

logger = logging.getLogger(__name__)

REMEMBER_RECORDS = 4096
"""Records per partition before the start, at least, whose ids are read again, so that late repeats are known."""
REMEMBER_SECONDS = 60.0


def remembered_records(batch_size: int, max_lag: int) -> int:
    """How far back, per partition, a repeat may lie that could still be trained.

    One of an older step is too stale: with its oldest token at version v it was trained before v + max_lag + 1.
    That many batches and one more, twice over for what was dropped between them, all in one partition.
    """
    return max(REMEMBER_RECORDS, 2 * batch_size * (max_lag + 2))


class SampleSource:
    """Feeds a BatchBuilder from Kafka."""

    def __init__(
        self, consumer: KafkaConsumer, builder: BatchBuilder, partitions: Sequence[TopicPartition]
    ) -> None:
        """`consumer` stands at the builder's positions: see `open_source`."""
        self._consumer, self._builder, self._partitions = consumer, builder, partitions
        self.refused: list[tuple[Any, InvalidMessageError]] = []
        """Records that could not be decoded since the list was last emptied."""

    def next_batch(self, version: int, stopping: threading.Event) -> Batch | None:
        """Wait for a batch to update `version` with; None once `stopping` is set."""
        while not stopping.is_set():
            batch = self._builder.take(version)
            if batch is not None:
                return batch
            self._offer(poll_records(self._consumer, idle=stopping.wait))
        return None

    def close(self) -> None:
        """Release the client."""
        self._consumer.close()

    def _offer(self, records: Sequence[Any]) -> None:
        for record in records:
            try:
                sample = SAMPLE.decode(record.value, record.headers)
            except InvalidMessageError as e:
                logger.warning(
                    "sample refused partition=%d offset=%d: %s", record.partition, record.offset, e
                )
                self.refused.append((record, e))
                self._builder.refuse(record.partition, record.offset)
            else:
                self._builder.offer(record.partition, record.offset, sample)


def open_source(
    consumer: KafkaConsumer,
    topic: str,
    *,
    batch_size: int,
    max_lag: int,
    finished: Mapping[int, int],
) -> SampleSource:
    """A source that starts at the committed offsets of the consumer's group.

    `finished`: (partition -> next offset) of the newest weight record, which wins where the two differ. Without
    either a partition is read from its beginning. Raises BrokerError.
    """
    partitions = partitions_of(consumer, topic)
    consumer.assign(partitions)
    first = consumer.beginning_offsets(partitions)
    positions: dict[int, int] = {}
    for tp in partitions:
        committed = consumer.committed(tp)
        wanted = finished.get(tp.partition, committed)
        if committed is not None and wanted != committed:
            logger.warning(
                "committed offset differs from the newest version's partition=%d committed=%d version=%d",
                tp.partition,
                committed,
                wanted,
            )
        position = first[tp] if wanted is None else wanted
        if position < first[tp]:
            metrics.records_expired.inc(first[tp] - position)
            logger.warning(
                "retention removed %d unread samples partition=%d", first[tp] - position, tp.partition
            )
            position = first[tp]
        positions[tp.partition] = position
    count = remembered_records(batch_size, max_lag)
    # One partition is read after the other: none may push out what another one told.
    builder = BatchBuilder(
        batch_size, max_lag, positions, remembered=max(REMEMBERED, count * len(partitions))
    )
    _remember(consumer, builder, partitions, first, positions, count)
    for tp in partitions:
        consumer.seek(tp, positions[tp.partition])
    return SampleSource(consumer, builder, partitions)


def _remember(
    consumer: KafkaConsumer,
    builder: BatchBuilder,
    partitions: Sequence[TopicPartition],
    first: Mapping[TopicPartition, int],
    positions: Mapping[int, int],
    count: int,
    *,
    timeout_s: float = REMEMBER_SECONDS,
) -> None:
    """Read the ids of the `count` newest finished records of each partition again, from their headers.

    BrokerError when they cannot be read in time: a trainer that does not know them may train one twice.

    One partition after the other, not by pause(): kafka-python 3.0.12 may leave what it had fetched of a paused
    partition lying.
    """
    deadline = time.monotonic() + timeout_s
    for tp in partitions:
        end = positions[tp.partition]
        if end <= first[tp]:
            continue
        consumer.assign([tp])
        consumer.seek(tp, max(first[tp], end - count))
        while consumer.position(tp) < end:
            if time.monotonic() > deadline:
                raise BrokerError(f"the finished samples of {tp.topic}-{tp.partition} cannot be read")
            for record in poll_records(consumer):
                trajectory_id = header(record.headers, TRAJECTORY_HEADER)
                if record.offset < end and trajectory_id is not None:
                    builder.remember(trajectory_id)
    consumer.assign(partitions)
