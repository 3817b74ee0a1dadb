"""What a partition of `scores` held just before the offset where a worker starts to read it.

All of that was acknowledged, so its groups were closed and sent: a repeat of one of them must not open its
group again. One group span is enough, for a group's members lie within it. How long that is the records
say, not this worker's configuration: the further out the deadlines that are found, the further back it reads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from kafka import TopicPartition

from ..schemas.codec import header
from ..schemas.config import KafkaConfig
from ..schemas.errors import BrokerError, InvalidMessageError
from ..schemas.score import SCORE, Score
from .groups import REMEMBER_MS
from .kafka import closing, make_consumer
from .verdicts import MAX_GROUP_MS
from .verify import DEADLINE_HEADER, TRAJECTORY_HEADER

logger = logging.getLogger(__name__)

READ_SECONDS = 60.0

Recall = Callable[[str, str, int], None]
"""(group_id, trajectory_id, deadline_ms), as GroupBook.recall takes them."""
Observe = Callable[[Score, int], None]
"""(score, offset), as Baselines.observe takes them."""


def recall_before(
    config: KafkaConfig,
    topic: str,
    partition: int,
    offset: int,
    *,
    at_ms: int,
    span_ms: int,
    recall: Recall,
) -> int:
    """Call `recall` for each score of the partition below `offset`, appended since `span_ms` before `at_ms`.

    Where a deadline lies further from its record's append time, that distance is the span (24 hours at most:
    verify refuses more). A group is missed only if no record in the span tells of one as long. Returns how many
    records there were. Raises BrokerError when they cannot be read.
    """
    tp = TopicPartition(topic, partition)
    with closing(make_consumer(config, client_id="headrace-recall")) as consumer:
        consumer.assign([tp])
        end, count, longest = offset, 0, span_ms
        while True:
            start = _offset_at(consumer, tp, at_ms - longest, offset)
            if start >= end:
                return count
            consumer.seek(tp, start)
            read, found = _read(consumer, tp, end, recall)
            end, count = start, count + read
            if found + REMEMBER_MS <= longest:
                return count
            longest = min(found, MAX_GROUP_MS) + REMEMBER_MS


def _offset_at(consumer: Any, tp: TopicPartition, since_ms: int, offset: int) -> int:
    """Of the first record appended since then; `offset` where there is none."""
    found = consumer.offsets_for_times({tp: max(0, since_ms)})[tp]
    start = found.offset if found is not None else offset
    return max(start, int(consumer.beginning_offsets([tp])[tp]))


def _read(consumer: Any, tp: TopicPartition, offset: int, recall: Recall) -> tuple[int, int]:
    """Recall up to `offset`; how many records, and the longest time from an append to a deadline."""
    count, longest, give_up = 0, 0, time.monotonic() + READ_SECONDS
    while consumer.position(tp) < offset:
        if time.monotonic() > give_up:
            raise BrokerError(f"{tp.topic}-{tp.partition} cannot be read up to offset {offset}")
        for record in consumer.poll(timeout_ms=200).get(tp, ()):
            if record.offset < offset:
                longest = max(longest, _note(record, recall) - record.timestamp)
                count += 1
    return count, longest


def _note(record: Any, recall: Recall) -> int:
    """From the headers where they say enough: decoding costs ten times the reading. Returns the deadline, or 0."""
    trajectory_id, deadline = (header(record.headers, h) for h in (TRAJECTORY_HEADER, DEADLINE_HEADER))
    if record.key and trajectory_id is not None and deadline is not None and deadline.isdigit():
        recall(record.key.decode("utf-8", "replace"), trajectory_id, int(deadline))
        return int(deadline)
    try:
        score = SCORE.decode(record.value, record.headers)
    except InvalidMessageError:
        return 0  # it became a dead letter when it was read
    recall(score.group_id, score.trajectory_id, score.group_deadline_ms)
    return score.group_deadline_ms


def observe_before(
    config: KafkaConfig, topic: str, partition: int, offset: int, *, offsets: int, observe: Observe
) -> None:
    """Call `observe` for the scores in the `offsets` offsets below `offset`, in order. Raises BrokerError."""
    tp = TopicPartition(topic, partition)
    with closing(make_consumer(config, client_id="headrace-history")) as consumer:
        consumer.assign([tp])
        start = max(offset - offsets, int(consumer.beginning_offsets([tp])[tp]))
        if start >= offset:
            return
        consumer.seek(tp, start)
        give_up = time.monotonic() + READ_SECONDS
        while consumer.position(tp) < offset:
            if time.monotonic() > give_up:
                raise BrokerError(f"{tp.topic}-{tp.partition} cannot be read up to offset {offset}")
            for record in consumer.poll(timeout_ms=200).get(tp, ()):
                if record.offset < offset:
                    with contextlib.suppress(InvalidMessageError):  # it became a dead letter when it was read
                        observe(SCORE.decode(record.value, record.headers), record.offset)
