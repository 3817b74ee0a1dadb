"""Records by reference: (partition, offset) -> the raw record, read with a plain consumer assigned by hand.

What is wanted lies close together, so a run of near offsets costs one seek and records that arrive in between
are kept undecoded for a while: the next batch usually wants them. A record is missing only when the log proves
it (retention passed it, or the log jumps over it or ends before it); a broker that is silent is an error.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaError

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError
from ...schemas.score import Ref
from ...streams.kafka import make_consumer

NEAR = 512
"""Records that are skipped rather than sought over."""
KEEP_BYTES = 64 * 1024 * 1024
DOUBT_SECONDS = 1.0
"""Time without a wanted record after which the broker is asked where the log begins and ends."""


class KeptRecords:
    """Raw records that nobody wanted yet, the oldest forgotten first."""

    def __init__(self, limit: int = KEEP_BYTES) -> None:
        self._limit = limit
        self._bytes = 0
        self._records: OrderedDict[Ref, Any] = OrderedDict()

    def put(self, ref: Ref, record: Any) -> None:
        """Keep one."""
        if ref in self._records:
            return
        self._records[ref] = record
        self._bytes += len(record.value or b"")
        while self._bytes > self._limit:
            _, old = self._records.popitem(last=False)
            self._bytes -= len(old.value or b"")

    def pop(self, ref: Ref) -> Any | None:
        """The record at `ref`, which is then no longer kept."""
        record = self._records.pop(ref, None)
        if record is not None:
            self._bytes -= len(record.value or b"")
        return record


class RefReader:
    """Fetches records of one topic by reference."""

    def __init__(
        self,
        config: KafkaConfig,
        topic: str,
        *,
        client_id: str,
        now: Callable[[], float] = time.monotonic,
        consumer: Any = None,
    ) -> None:
        """`consumer`: an unassigned kafka-python consumer; one is made when it is None."""
        self._topic, self._now = topic, now
        self._consumer = consumer if consumer is not None else make_consumer(config, client_id=client_id)
        self._kept = KeptRecords()
        self._wanted: dict[int, list[int]] = {}
        """Partition -> offsets still to come, descending."""

    def fetch(self, refs: Iterable[Ref], *, timeout_s: float = 60.0) -> dict[Ref, Any]:
        """The records at `refs`; those that the log does not hold are left out. BrokerError after `timeout_s`."""
        found: dict[Ref, Any] = {}
        self._wanted = {}
        for ref in sorted(set(refs), key=lambda r: (r.partition, -r.offset)):
            record = self._kept.pop(ref)
            if record is None:
                self._wanted.setdefault(ref.partition, []).append(ref.offset)
            else:
                found[ref] = record
        if self._wanted:
            try:
                self._read(found, timeout_s)
            except KafkaError as e:
                raise BrokerError(f"records of {self._topic} cannot be read: {e}") from e
        return found

    def close(self) -> None:
        """Release the client."""
        self._consumer.close()

    def _read(self, found: dict[Ref, Any], timeout_s: float) -> None:
        deadline = self._now() + timeout_s
        progress = self._now()
        missing = self._missing()
        while missing:
            self._aim()
            for tp, records in self._consumer.poll(timeout_ms=100).items():
                self._take(tp.partition, records, found)
            now, before, missing = self._now(), missing, self._missing()
            if missing < before:
                progress = now
            elif now - progress > DOUBT_SECONDS:
                self._give_up_outside()
                progress, missing = now, self._missing()
            if missing and now > deadline:
                raise BrokerError(f"{missing} records of {self._topic} did not arrive in {timeout_s:.0f} s")

    def _missing(self) -> int:
        return sum(len(offsets) for offsets in self._wanted.values())

    def _aim(self) -> None:
        """Read exactly the partitions of which something is wanted; seek where it is behind or far ahead.

        Not by pause(): kafka-python 3.0.12 parks what it had fetched of a paused partition, and does not take it
        up again while the partition it read last is drained: the reader would wait for ever.
        """
        wanted = {self._tp(p): offsets[-1] for p, offsets in self._wanted.items() if offsets}
        known = self._consumer.assignment()
        if set(wanted) != set(known):
            self._consumer.assign(list(wanted))
        for tp, offset in wanted.items():
            if tp not in known or not 0 <= offset - self._consumer.position(tp) <= NEAR:
                self._consumer.seek(tp, offset)

    def _take(self, partition: int, records: list[Any], found: dict[Ref, Any]) -> None:
        offsets = self._wanted.get(partition, [])
        for record in records:
            while offsets and offsets[-1] < record.offset:
                offsets.pop()  # the log jumped over it
            ref = Ref(partition, record.offset)
            if offsets and offsets[-1] == record.offset:
                offsets.pop()
                found[ref] = record
            else:
                self._kept.put(ref, record)

    def _give_up_outside(self) -> None:
        """Forget wanted offsets before the log's beginning or after its end."""
        partitions = [self._tp(p) for p, offsets in self._wanted.items() if offsets]
        first = self._consumer.beginning_offsets(partitions)
        end = self._consumer.end_offsets(partitions)
        for tp in partitions:
            inside = [o for o in self._wanted[tp.partition] if first[tp] <= o < end[tp]]
            self._wanted[tp.partition] = inside

    def _tp(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topic, partition)
