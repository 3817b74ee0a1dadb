"""Refuses Arrow streams whose record batches are compressed by Arrow itself, before any of it is inflated.

Arrow allocates what a compressed buffer claims to hold. Our writers compress inside the columns, under limits that
our readers know, so a compressed body is either a mistake or an attack. The flatbuffer layout is that of Arrow's
Message.fbs: Message { version, header_type, header, ... }, RecordBatch { length, nodes, buffers, compression }.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import pyarrow as pa

from .errors import WeightUpdateError

_HEADER, _COMPRESSION = 2, 3
"""Slots in Message and in RecordBatch."""


def require_plain(source: bytes | memoryview | BinaryIO) -> None:
    """WeightUpdateError where a batch of the stream is compressed; a file is put back where it was.

    Raises Arrow's errors, or struct.error, for what is no stream.
    """
    if isinstance(source, bytes | memoryview):
        _require_plain(pa.ipc.MessageReader.open_stream(pa.py_buffer(source)))
        return
    at = source.tell()
    _require_plain(pa.ipc.MessageReader.open_stream(source))
    source.seek(at)


def _require_plain(messages: pa.ipc.MessageReader) -> None:
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        if message.type == "dictionary":
            raise WeightUpdateError("not_a_delta", "a dictionary, which no delta has")
        if message.type == "record batch" and _is_compressed(message.metadata.to_pybytes()):
            raise WeightUpdateError("not_a_delta", "a batch that Arrow compressed: its size has no limit")


def _is_compressed(metadata: bytes) -> bool:
    table = struct.unpack_from("<I", metadata, 0)[0]
    at = _field(metadata, table, _HEADER)
    if at is None:
        return False
    batch = at + struct.unpack_from("<I", metadata, at)[0]
    return _field(metadata, batch, _COMPRESSION) is not None


def _field(data: bytes, table: int, slot: int) -> int | None:
    """Where the field of a flatbuffer table lies; None where the table has none."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    size = struct.unpack_from("<H", data, vtable)[0]
    if 4 + 2 * slot >= size:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0]
    return table + offset if offset else None
