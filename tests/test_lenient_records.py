"""Header names that are not UTF-8 are read by both clients."""

from __future__ import annotations

from typing import Any

import kafka.record.memory_records as kafka_memory
import pytest
from aiokafka.consumer.fetcher import READ_COMMITTED, PartitionRecords
from aiokafka.structs import TopicPartition
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from headrace.streams.lenient_names import LenientRecordBatch
from headrace.streams.lenient_records import LenientMemoryRecords


def batch(name: bytes) -> bytes:
    """Five records; the third has a header called `name` (its bytes take the place of a name as long)."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10**6)
    plain = "N" * len(name)
    for i in range(5):
        builder.append(i, i, b"\xffk", b"v%d" % i, [(plain if i == 2 else "ok", b"\xff\x00")])
    return bytes(builder.build()).replace(plain.encode(), name)


def readers(data: bytes, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    monkeypatch.setattr(kafka_memory, "DefaultRecordBatch", LenientRecordBatch)
    return [
        [r for r in records.next_batch()]
        for records in (LenientMemoryRecords(data), kafka_memory.MemoryRecords(data))
    ]


@pytest.mark.parametrize(("name", "text"), [(b"\xff\xfeab", "\\xff\\xfeab"), (b"fine", "fine")])
def test_each_record_of_the_batch_is_read_once(
    name: bytes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found in readers(batch(name), monkeypatch):
        assert [(r.offset, r.key, r.value) for r in found] == [(i, b"\xffk", b"v%d" % i) for i in range(5)]
        assert [list(map(tuple, r.headers)) for r in found][2] == [(text, b"\xff\x00")]
        assert all(type(r.value) is bytes and type(r.headers[0][1]) is bytes for r in found)


def test_the_clients_own_reader_would_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_memory, "DefaultRecordBatch", DefaultRecordBatch)
    with pytest.raises(Exception, match=r"utf-8|codec|Corrupt|record structure"):
        list(kafka_memory.MemoryRecords(batch(b"\xff\xfeab")).next_batch())


def transaction(offset: int, producer: int, end: bytes) -> bytes:
    """One record of a transaction at `offset`, and its marker after it; `end`: 0 aborts, 1 commits."""
    written = bytearray()
    for key, value in ((b"k", b"v%d" % offset), (b"\0\0\0" + end, bytes(6))):
        builder = DefaultRecordBatchBuilder(2, 0, 1, producer, 0, -1, 10**6)
        builder.append(0, 0, key, value, [])
        made = bytearray(builder.build())
        made[:8] = (offset + (value == bytes(6))).to_bytes(8, "big")
        made[22] |= 0x20 if value == bytes(6) else 0
        written += made
    return bytes(written)


def test_transactions_are_read_and_aborted_ones_are_not() -> None:
    data = batch(b"fine") + transaction(5, 7, b"\0") + transaction(7, 7, b"\1") + transaction(9, 8, b"\1")
    where = TopicPartition("t", 0)
    records = LenientMemoryRecords(data)
    read = PartitionRecords(where, records, [(7, 5)], 0, None, None, False, READ_COMMITTED)
    assert [r.value for r in read] == [b"v%d" % i for i in (0, 1, 2, 3, 4, 7, 9)]
    assert read.next_fetch_offset == 11
