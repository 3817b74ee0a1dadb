"""Records whose header names are not UTF-8: read, where both Kafka clients would raise at them for ever.

A byte of a name that is not UTF-8 is read as the four characters `\\xff`; keys, values and header values keep
every byte. A batch is read a second time only where the client's own reader has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiokafka.consumer.fetcher
from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import _MemoryRecordsPy

from .lenient_names import LenientBuffer


class _AioBatch(_DefaultRecordBatchPy):
    def _read_msg(self, *args: Any) -> Any:
        buffer: Any = getattr(self, "_buffer")  # noqa: B009 - it has no declared type
        self._buffer: Any = buffer if isinstance(buffer, LenientBuffer) else LenientBuffer(buffer)
        return super()._read_msg(*args)


class _Batch:
    """aiokafka's fast reader of one batch, and the lenient one from the record on at which it fails."""

    def __init__(self, fast: Any, data: memoryview) -> None:
        self._fast, self._data = fast, data
        self._records = self._read()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The fetcher takes the one record of a transaction's marker by `next(batch)`."""
        return next(self._records)

    def _read(self) -> Iterator[Any]:
        read = 0
        try:
            for record in self._fast:
                yield record
                read += 1
        except (UnicodeDecodeError, CorruptRecordException):
            for number, record in enumerate(_AioBatch(self._data)):
                if number >= read:
                    yield record


class LenientMemoryRecords(_MemoryRecordsPy):
    """In place of aiokafka's MemoryRecords."""

    def next_batch(self, *args: Any) -> Any:
        """The next batch; None at the end."""
        data = self._next_slice
        batch = super().next_batch(*args)
        return batch if batch is None or data is None else _Batch(batch, data)


def install() -> None:
    """Make aiokafka lenient in this process. Idempotent."""
    aiokafka.consumer.fetcher.MemoryRecords = LenientMemoryRecords
