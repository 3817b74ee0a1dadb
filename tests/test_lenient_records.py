"""Header names that are not UTF-8 are read by both clients."""

from __future__ import annotations

from typing import Any

import kafka.record.memory_records as kafka_memory
import pytest
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
