"""Holes in a partition's offsets: what compaction removed, aborted transactions, the markers of transactions.

Whether an offset that did not come is a hole or was lost on the way only the broker can say: it is asked
afresh, by a client that has read nothing else.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable

from kafka import TopicPartition

from ..schemas.config import KafkaConfig
from ..schemas.errors import BrokerError
from .kafka import closing, make_consumer

LOOK_RECORDS = 2000
"""How many records one look takes, so that a compacted topic costs one look in so many records."""
LOOK_SECONDS = 20.0

Hole = tuple[int, int]
"""The first offset that holds no readable record, and the next one that may."""
Look = Callable[[str, int, int], list[Hole]]
"""(topic, partition, offset) -> the holes from `offset` on, in order."""


def look_with(config: KafkaConfig) -> Look:
    """A `Look` that asks the broker of `config`."""
    return lambda topic, partition, offset: holes_from(config, topic, partition, offset)


def holes_from(config: KafkaConfig, topic: str, partition: int, offset: int) -> list[Hole]:
    """The holes among the next records of a partition, from `offset` on; one may reach its readable end.

    Raises BrokerError when the broker does not answer in time.
    """
    tp = TopicPartition(topic, partition)
    with closing(
        make_consumer(config, client_id="headrace-holes", max_poll_records=LOOK_RECORDS)
    ) as consumer:
        consumer.assign([tp])
        consumer.seek(tp, offset)
        end = consumer.end_offsets([tp])[tp]
        give_up = time.monotonic() + LOOK_SECONDS
        found: list[Hole] = []
        due, count = offset, 0
        while due < end and count < LOOK_RECORDS:
            if time.monotonic() > give_up:
                raise BrokerError(f"{topic}-{partition} cannot be read from offset {due} on")
            for record in consumer.poll(timeout_ms=200).get(tp, ()):
                if record.offset > due:
                    found.append((due, record.offset))
                due, count = record.offset + 1, count + 1
            position = consumer.position(tp)
            if position > due:  # nothing readable lies between
                found.append((due, position))
                due = position
    return _joined(found)


def _joined(holes: list[Hole]) -> list[Hole]:
    joined: list[Hole] = []
    for start, end in holes:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


class HoleBook:
    """The holes of one partition that are not committed past yet."""

    def __init__(self) -> None:
        self._holes: list[Hole] = []

    def add(self, holes: list[Hole]) -> None:
        """Take note of holes; one that starts where a known one does replaces it when it reaches further."""
        for hole in holes:
            known = next((h for h in self._holes if h[0] == hole[0]), None)
            if known is None:
                insort(self._holes, hole)
            elif hole[1] > known[1]:
                self._holes[self._holes.index(known)] = hole

    def past(self, offset: int) -> int:
        """`offset`, or where it lies in a hole the end of that."""
        for start, end in self._holes:
            if start <= offset < end:
                offset = end
        return offset

    def forget_below(self, offset: int) -> None:
        """Holes that end before `offset` are of no use any more."""
        self._holes = [h for h in self._holes if h[1] >= offset]
