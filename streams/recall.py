"""What a partition of `scores` held just before the offset where a worker starts to read it.

All of that was acknowledged, so its groups were closed and sent: a repeat of one of them must not open its
group again. One group span is enough, for a group's members lie within it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kafka import TopicPartition

from ..schemas.codec import header
from ..schemas.config import KafkaConfig
from ..schemas.errors import BrokerError, InvalidMessageError
from ..schemas.score import SCORE
from .kafka import closing, make_consumer
from .verify import DEADLINE_HEADER, TRAJECTORY_HEADER

logger = logging.getLogger(__name__)

READ_SECONDS = 60.0

Recall = Callable[[str, str, int], None]
"""(group_id, trajectory_id, deadline_ms), as GroupBook.recall takes them."""


def recall_before(
    config: KafkaConfig, topic: str, partition: int, offset: int, *, since_ms: int, recall: Recall
) -> int:
    """Call `recall` for each score of the partition appended since `since_ms` and below `offset`.

    Returns how many there were. Raises BrokerError when they cannot be read.
    """
    tp = TopicPartition(topic, partition)
    with closing(make_consumer(config, client_id="headrace-recall")) as consumer:
        consumer.assign([tp])
        found = consumer.offsets_for_times({tp: max(0, since_ms)})[tp]
        start = max(found.offset if found is not None else offset, consumer.beginning_offsets([tp])[tp])
        if start >= offset:
            return 0
        consumer.seek(tp, start)
        return _read(consumer, tp, offset, recall)


def _read(consumer: Any, tp: TopicPartition, offset: int, recall: Recall) -> int:
    count, give_up = 0, time.monotonic() + READ_SECONDS
    while consumer.position(tp) < offset:
        if time.monotonic() > give_up:
            raise BrokerError(f"{tp.topic}-{tp.partition} cannot be read up to offset {offset}")
        for record in consumer.poll(timeout_ms=200).get(tp, ()):
            if record.offset < offset:
                _note(record, recall)
                count += 1
    return count


def _note(record: Any, recall: Recall) -> None:
    """From the headers where they say enough: decoding costs ten times the reading."""
    trajectory_id, deadline = (header(record.headers, h) for h in (TRAJECTORY_HEADER, DEADLINE_HEADER))
    if record.key and trajectory_id is not None and deadline is not None and deadline.isdigit():
        recall(record.key.decode("utf-8", "replace"), trajectory_id, int(deadline))
        return
    try:
        score = SCORE.decode(record.value, record.headers)
    except InvalidMessageError:
        return  # it became a dead letter when it was read
    recall(score.group_id, score.trajectory_id, score.group_deadline_ms)
