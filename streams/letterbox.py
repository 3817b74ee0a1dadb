"""The dead letters of a namespace, for the person who looks after them: find, show, requeue, drop.

A requeued record and the marker that settles its letter are one transaction, and the markers are read under the
same transactional id: two people who requeue at once do not send a record twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError

from ..schemas.codec import header
from ..schemas.config import Config
from ..schemas.deadletter import (
    REQUEUES,
    SETTLED,
    SETTLES,
    TRUNCATED,
    DeadLetter,
    original_headers,
    read_dead_letter,
    requeues_of,
)
from ..schemas.errors import BrokerError
from ..schemas.topics import DEADLETTERS, Topics
from .bounded import TRANSACTION_SECONDS, bounded
from .kafka import closing, make_consumer, make_producer

READ_SECONDS = 60.0
COMMIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One dead letter without its content."""

    number: int
    """Its offset in `deadletters`, by which commands name it."""
    letter: DeadLetter
    requeues: int
    truncated: bool
    size: int
    """Bytes of the value that are in the letter."""
    settled: str | None
    """`requeued`, `dropped`, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which letters; None stands for any."""

    numbers: frozenset[int] = frozenset()
    stage: str | None = None
    topic: str | None = None
    """Its whole name, or without the namespace."""
    reason: str | None = None
    partition: int | None = None
    offset: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def takes(self, item: Letter) -> bool:
        """Whether the letter is one of them."""
        letter = item.letter
        return (
            (not self.numbers or item.number in self.numbers)
            and self.stage in (None, letter.stage)
            and self.reason in (None, letter.reason)
            and self.partition in (None, letter.partition)
            and self.offset in (None, letter.offset)
            and (self.topic is None or letter.topic == self.topic or letter.topic.endswith("." + self.topic))
            and (self.since_ms is None or letter.at_ms >= self.since_ms)
            and (self.until_ms is None or letter.at_ms < self.until_ms)
        )


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a requeue or a drop did with one letter."""

    number: int
    done: bool
    note: str


class LetterBox:
    """Reads and settles the letters of one namespace."""

    def __init__(self, config: Config, consumer: KafkaConsumer, ends: KafkaConsumer) -> None:
        """`ends` sees the end of a topic with what is being committed."""
        self._config, self._consumer, self._ends = config, consumer, ends
        self._topic = Topics(config.run.namespace).name(DEADLETTERS)

    def letters(self) -> list[Letter]:
        """Every letter that is kept, oldest first. Raises BrokerError."""
        if not self._consumer.partitions_for_topic(self._topic):
            return []
        tp = TopicPartition(self._topic, 0)
        self._consumer.assign([tp])
        start, end = self._consumer.beginning_offsets([tp])[tp], self._settled_end(tp)
        settled: dict[int, str] = {}
        found = []
        for record in self._read(tp, start, end):
            marks, how = header(record.headers, SETTLES), header(record.headers, SETTLED)
            if marks is not None and how is not None and marks.isdecimal():
                settled[int(marks)] = how
            else:
                found.append(_letter(record, None))
        return [replace(item, settled=settled.get(item.number)) for item in found]

    def record(self, topic: str, partition: int, offset: int) -> Any | None:
        """One record, None where it is kept no longer (or never was one)."""
        tp = TopicPartition(topic, partition)
        if partition not in (self._consumer.partitions_for_topic(topic) or ()):
            return None
        self._consumer.assign([tp])
        start, end = self._consumer.beginning_offsets([tp])[tp], self._consumer.end_offsets([tp])[tp]
        if not start <= offset < end:
            return None
        return next((r for r in self._read(tp, offset, offset + 1) if r.offset == offset), None)

    def content(self, number: int) -> Any | None:
        """The record of a letter."""
        return self.record(self._topic, 0, number)

    def drop(self, letters: Iterable[Letter]) -> list[Settlement]:
        """Mark letters as seen. Raises BrokerError."""
        with self._transactions() as producer:
            settled = {item.number: item.settled for item in self.letters()}
            return [self._drop(producer, item, settled.get(item.number)) for item in letters]

    def requeue(self, letters: Iterable[Letter], *, limit: int, force: bool = False) -> list[Settlement]:
        """Send the originals to their topics again; each at most `limit` times unless `force`.

        Raises BrokerError.
        """
        with self._transactions() as producer:
            settled = {item.number: item.settled for item in self.letters()}
            return [self._requeue(producer, i, settled.get(i.number), limit, force) for i in letters]

    def _drop(self, producer: KafkaProducer, item: Letter, settled: str | None) -> Settlement:
        if settled is not None:
            return Settlement(item.number, False, f"is {settled} already")
        self._commit(producer, item, "dropped")
        return Settlement(item.number, True, "dropped")

    def _requeue(
        self, producer: KafkaProducer, item: Letter, settled: str | None, limit: int, force: bool
    ) -> Settlement:
        where = f"{item.letter.topic} partition {item.letter.partition} offset {item.letter.offset}"
        if settled is not None and not force:
            return Settlement(item.number, False, f"is {settled} already; --force sends it again")
        if item.requeues >= limit and not force:
            note = (
                f"was requeued {item.requeues} times and came back; mend the cause, then use --force or --max"
            )
            return Settlement(item.number, False, note)
        if item.truncated:
            record = self.record(item.letter.topic, item.letter.partition, item.letter.offset)
            missing = f"was cut, and the original at {where} is kept no longer; `drop` settles it"
        else:
            record = self.content(item.number)
            missing = "is kept no longer"
        if record is None:
            return Settlement(item.number, False, missing)
        if record.key is None and record.value is None:
            return Settlement(
                item.number, False, "has neither key nor value: nothing to send; `drop` settles it"
            )
        if not self._consumer.partitions_for_topic(item.letter.topic):
            return Settlement(item.number, False, f"its topic {item.letter.topic} does not exist")
        headers = [*original_headers(record.headers), (REQUEUES, str(item.requeues + 1).encode())]
        self._commit(producer, item, "requeued", (record.key, record.value, headers))
        return Settlement(item.number, True, f"requeued to {item.letter.topic}")

    def _commit(
        self, producer: KafkaProducer, item: Letter, how: str, again: tuple[Any, Any, Any] | None = None
    ) -> None:
        marker = [(SETTLED, how.encode()), (SETTLES, str(item.number).encode())]

        def transaction() -> None:
            producer.begin_transaction()
            if again is not None:
                key, value, headers = again
                producer.send(item.letter.topic, value, key=key, headers=headers)
            producer.send(self._topic, None, key=b"settled", headers=marker, partition=0)
            producer.commit_transaction()

        try:
            bounded(transaction, limit_s=TRANSACTION_SECONDS, what="the transaction")
        except KafkaError as e:
            raise BrokerError(f"dead letter {item.number} could not be {how}: {e}") from e

    @contextmanager
    def _transactions(self) -> Iterator[KafkaProducer]:
        name = Topics(self._config.run.namespace).group("deadletters")
        producer = make_producer(self._config.kafka, client_id=name, transactional_id=name, linger_ms=0)
        with closing(producer):
            what = "the start of transactions"
            try:
                bounded(producer.init_transactions, limit_s=TRANSACTION_SECONDS, what=what)
            except KafkaError as e:
                raise BrokerError(f"dead letters cannot be settled: {e}") from e
            yield producer

    def _settled_end(self, tp: TopicPartition) -> int:
        """The end, after a short wait for commits on their way: a marker just written would be missed."""
        target, give_up = self._ends.end_offsets([tp])[tp], time.monotonic() + COMMIT_SECONDS
        while True:
            end = int(self._consumer.end_offsets([tp])[tp])
            if end >= target or time.monotonic() > give_up:
                return end
            time.sleep(0.02)

    def _read(self, tp: TopicPartition, start: int, end: int) -> Iterator[Any]:
        self._consumer.seek(tp, start)
        give_up = time.monotonic() + READ_SECONDS
        while self._consumer.position(tp) < end:
            if time.monotonic() > give_up:
                raise BrokerError(f"{tp.topic}-{tp.partition} cannot be read up to offset {end}")
            for record in self._consumer.poll(timeout_ms=200).get(tp, ()):
                if record.offset < end:
                    yield record


def _letter(record: Any, settled: str | None) -> Letter:
    return Letter(
        number=record.offset,
        letter=read_dead_letter(record.headers),
        requeues=requeues_of(record.headers),
        truncated=header(record.headers, TRUNCATED) is not None,
        size=len(record.value or b""),
        settled=settled,
    )


@contextmanager
def open_letterbox(config: Config) -> Iterator[LetterBox]:
    """The letters of the configured namespace."""
    name = "headrace-deadletters"
    with (
        closing(make_consumer(config.kafka, client_id=name)) as consumer,
        closing(make_consumer(config.kafka, client_id=name, isolation_level="read_uncommitted")) as ends,
    ):
        yield LetterBox(config, consumer, ends)
