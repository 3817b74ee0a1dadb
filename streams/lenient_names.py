"""Header names that are not UTF-8, for kafka-python: read, where it would raise at the record for ever.

A byte of a name that is not UTF-8 is read as the four characters `\\xff`; keys, values and header values keep
every byte.
"""

from __future__ import annotations

from typing import Any

import kafka.record.memory_records
from kafka.record.default_records import DefaultRecordBatch


class _Name(bytes):
    """Bytes that decode whatever they hold."""

    def decode(self, encoding: str = "utf-8", errors: str = "backslashreplace") -> str:
        return super().decode(encoding, "backslashreplace")


class LenientBuffer(bytearray):
    """A buffer whose slices decode whatever they hold."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Name(found) if isinstance(index, slice) else found


class LenientRecordBatch(DefaultRecordBatch):
    """In place of kafka-python's DefaultRecordBatch."""

    def _read_msg(self, *args: Any) -> Any:
        try:
            return super()._read_msg(*args)
        except UnicodeDecodeError:  # nothing was consumed: the position moves at the end
            buffer: Any = getattr(self, "_buffer")  # noqa: B009 - it has no declared type
            self._buffer: Any = LenientBuffer(buffer)
            return super()._read_msg(*args)


def install() -> None:
    """Make kafka-python lenient in this process. Idempotent."""
    kafka.record.memory_records.DefaultRecordBatch = LenientRecordBatch
