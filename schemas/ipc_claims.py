"""How many bytes the compressed buffers of an Arrow stream claim to hold, before any of them is inflated.

Arrow allocates what a buffer claims, so a few kilobytes can ask for gigabytes. The flatbuffer layout is that of
Arrow's Message.fbs: Message { version, header_type, header, ... }, DictionaryBatch { id, data, ... }, RecordBatch
{ length, nodes, buffers: [{ int64 offset, int64 length }], compression }; a compressed buffer begins with its size
as int64, -1 where it is stored as it is.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import pyarrow as pa

_HEADER, _DATA, _BUFFERS, _COMPRESSION = 2, 1, 2, 3
"""Slots in Message, DictionaryBatch and RecordBatch."""


def claimed_bytes(source: bytes | memoryview | BinaryIO) -> int:
    """The sum over all batches, 0 where nothing is compressed; a file is put back where it was.

    Raises Arrow's errors, and struct.error, for what is no stream.
    """
    if isinstance(source, bytes | memoryview):
        return _claimed(pa.ipc.MessageReader.open_stream(pa.py_buffer(source)))
    at = source.tell()
    claimed = _claimed(pa.ipc.MessageReader.open_stream(source))
    source.seek(at)
    return claimed


def _claimed(messages: pa.ipc.MessageReader) -> int:
    total = 0
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return total
        if message.type in ("record batch", "dictionary") and message.body is not None:
            metadata = message.metadata.to_pybytes()
            batch = _table(metadata, struct.unpack_from("<I", metadata)[0], _HEADER)
            if message.type == "dictionary" and batch is not None:
                batch = _table(metadata, batch, _DATA)
            if batch is not None:
                total += _claimed_by(metadata, batch, memoryview(message.body))


def _claimed_by(metadata: bytes, batch: int, body: memoryview) -> int:
    if _field(metadata, batch, _COMPRESSION) is None:
        return 0
    buffers = _table(metadata, batch, _BUFFERS)
    if buffers is None:
        return 0
    total = 0
    for i in range(struct.unpack_from("<I", metadata, buffers)[0]):
        offset, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * i)
        if length > 0:
            total += max(0, struct.unpack_from("<q", body, offset)[0])
    return total


def _table(data: bytes, table: int, slot: int) -> int | None:
    """Where the table or vector lies that a field points at."""
    at = _field(data, table, slot)
    return None if at is None else at + struct.unpack_from("<I", data, at)[0]


def _field(data: bytes, table: int, slot: int) -> int | None:
    """Where the field of a flatbuffer table lies; None where the table has none."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    if 4 + 2 * slot >= size:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0]
    return table + offset if offset else None
