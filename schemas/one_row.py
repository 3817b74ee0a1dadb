"""A record batch of one row in exactly the layout that is written here, read and written without Arrow's machinery.

An IPC stream of a fixed schema has constant bytes but for the numbers in the batch's metadata (body length, field
nodes, buffers) and the body itself. So the metadata is a template: writing fills it in; reading compares the rest,
checks every length and offset against the body, and takes the values straight from it. Whatever is laid out
otherwise is a LayoutError, and the caller asks pyarrow, who decides. What is taken here pyarrow takes too, and with
the same values (tests/test_one_row.py).

Layout: https://arrow.apache.org/docs/format/Columnar.html, sections "Serialization and IPC".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from .row_columns import Body, Column, column_of
from .row_reader import LayoutError, reader_of

__all__ = ["END_OF_STREAM", "LayoutError", "OneRow"]

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_MESSAGE_START = struct.Struct("<II")


class OneRow:
    """Reads and writes the streams of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self.head = schema.serialize().to_pybytes()
        """The schema message: how every stream begins."""
        self._columns: list[tuple[str, Column]] = []
        nodes = buffers = 0
        for field in schema:
            column = column_of(field.type, nodes, buffers)
            self._columns.append((field.name, column))
            nodes, buffers = column.next_node, column.next_buffer
        self._nodes = struct.Struct(f"<{2 * nodes}q")
        self._buffer_numbers = 2 * buffers
        self._buffers = struct.Struct(f"<{2 * buffers}q")
        self._read = reader_of(self._columns)
        self._template = _Template.of(schema, nodes, buffers)

    def write(self, row: Mapping[str, Any]) -> bytes:
        """The stream of `row`. LayoutError where a value has not the column's own Python or numpy type."""
        body = Body()
        try:
            for name, column in self._columns:
                column.write_one(body, row[name])
        except (struct.error, TypeError, UnicodeEncodeError, AttributeError, OverflowError) as e:
            raise LayoutError(str(e)) from None
        meta = bytearray(self._template.meta)
        at = self._template
        self._nodes.pack_into(meta, at.nodes, *body.nodes)
        self._buffers.pack_into(meta, at.buffers, *body.buffers)
        struct.pack_into("<q", meta, at.body_length, body.size)
        return b"".join((self.head, meta, *body.parts, END_OF_STREAM))

    def read(self, value: bytes) -> dict[str, Any]:
        """The row in `value`; lists of numbers as read-only arrays over it. LayoutError for any other layout."""
        at, start = self._template, len(self.head)
        base = start + len(at.meta)
        if not value.startswith(self.head) or not at.matches(value, start):
            raise LayoutError("other metadata")
        (size,) = struct.unpack_from("<q", value, start + at.body_length)
        if size < 0 or len(value) != base + size + len(END_OF_STREAM) or not value.endswith(END_OF_STREAM):
            raise LayoutError("not one batch to the end")
        _check_bounds(np.frombuffer(value, "<i8", self._buffer_numbers, start + at.buffers), size)
        buffers = self._buffers.unpack_from(value, start + at.buffers)
        nodes = self._nodes.unpack_from(value, start + at.nodes)
        try:
            return self._read(value, base, nodes, buffers)
        except (struct.error, UnicodeDecodeError) as e:
            raise LayoutError(str(e)) from None


def _check_bounds(buffers: np.ndarray, size: int) -> None:
    """Every (offset, length) lies inside a body of `size` bytes and starts at a multiple of 8."""
    if (
        np.minimum.reduce(buffers) < 0
        or np.maximum.reduce(buffers) > size  # before the sum, which would wrap around
        or np.maximum.reduce(buffers[::2] + buffers[1::2]) > size
        or np.bitwise_or.reduce(buffers[::2]) & 7
    ):
        raise LayoutError("a buffer beyond the body, or not aligned")


class _Template:
    """The batch message's start and metadata, and where its numbers are."""

    def __init__(
        self, meta: bytes, body_length: int, nodes: tuple[int, int], buffers: tuple[int, int]
    ) -> None:
        self.meta = meta
        self.body_length, self.nodes, self.buffers = body_length, nodes[0], buffers[0]
        holes = sorted([(body_length, body_length + 8), nodes, buffers])
        edges = [0, *(edge for hole in holes for edge in hole), len(meta)]
        self._fixed = [(a, b, meta[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    @classmethod
    def of(cls, schema: pa.Schema, nodes: int, buffers: int) -> _Template:
        """From a batch that pyarrow has written."""
        row = pa.array([{}], type=pa.struct([f.with_nullable(True) for f in schema]))
        message = (
            pa.RecordBatch.from_struct_array(row)
            .cast(pa.schema([f.with_nullable(True) for f in schema]))
            .serialize()
            .to_pybytes()
        )
        _, length = _MESSAGE_START.unpack_from(message)
        meta = message[: 8 + length]
        root = 8 + _u32(meta, 8)
        batch = _target(meta, root, 2)
        at = [_vector(meta, batch, field, count) for field, count in ((1, nodes), (2, buffers))]
        return cls(meta, _field(meta, root, 3), at[0], at[1])

    def matches(self, value: bytes, start: int) -> bool:
        """The metadata at `start` differs from this one in numbers only."""
        return all(value[start + a : start + b] == fixed for a, b, fixed in self._fixed)


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, index: int) -> int:
    """Position of a flatbuffer table's field."""
    (back,) = struct.unpack_from("<i", data, table)
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * index)
    if not offset:
        raise ValueError(f"field {index} is not in the message")
    return table + int(offset)


def _target(data: bytes, table: int, index: int) -> int:
    at = _field(data, table, index)
    return at + _u32(data, at)


def _vector(data: bytes, table: int, index: int, count: int) -> tuple[int, int]:
    """Range of a vector of `count` structs of 16 bytes."""
    at = _target(data, table, index)
    found = _u32(data, at)
    if found != count:
        raise ValueError(f"{found} entries in the message, {count} in the schema")
    return at + 4, at + 4 + 16 * count
