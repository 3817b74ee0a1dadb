"""Columns of a record batch as bytes: one class per kind of Arrow type, with the places of its node and buffers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


class Body:
    """A batch's body while it is written."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.nodes: list[int] = []
        self.buffers: list[int] = []

    def node(self, values: Sequence[Any]) -> None:
        """A field of `values`, and its validity bitmap."""
        nulls = values.count(None) if values else 0
        self.nodes += (len(values), nulls)
        self.add(_bits([v is not None for v in values]) if nulls else b"")

    def node_of(self, value: Any) -> None:
        """A field of the one `value`, and its validity bitmap."""
        if value is None:
            self.nodes += (1, 1)
            self.add(b"\0")
        else:
            self.nodes += (1, 0)
            self.buffers += (self.size, 0)

    def add(self, data: bytes) -> None:
        """A buffer, padded to 8 bytes."""
        length = len(data)
        self.buffers += (self.size, length)
        if length:
            pad = -length & 7
            self.parts += (data, _PADDING[pad]) if pad else (data,)
            self.size += length + pad


_PADDING = [bytes(n) for n in range(8)]


class Column:
    """One field. `node` and `buffer` are its places; `next_node` and `next_buffer` those of what follows it."""

    own_buffers = 1

    def __init__(self, node: int, buffer: int) -> None:
        self.node, self.buffer = 2 * node, 2 * buffer
        self.next_node, self.next_buffer = node + 1, buffer + self.own_buffers

    def write(self, body: Body, values: Sequence[Any]) -> None:
        """Append `values`; None is a null. Raises TypeError, struct.error and the like for a wrong type."""
        raise NotImplementedError

    def write_one(self, body: Body, value: Any) -> None:
        """Append the one `value`."""
        self.write(body, [value])


class Numbers(Column):
    """int32, int64, uint64 or float64."""

    own_buffers = 2

    def __init__(self, node: int, buffer: int, code: str) -> None:
        super().__init__(node, buffer)
        self.code, self.size = code, struct.calcsize(f"<{code}")
        self._padded = struct.Struct(f"<{code}{8 - self.size}x")

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        body.add(struct.pack(f"<{len(values)}{self.code}", *[0 if v is None else v for v in values]))

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        body.buffers += (body.size, self.size)
        body.parts.append(self._padded.pack(0 if value is None else value))
        body.size += 8


class Booleans(Column):
    """bool."""

    own_buffers = 2

    def write(self, body: Body, values: Sequence[Any]) -> None:
        if not all(v is None or isinstance(v, bool | np.bool_) for v in values):
            raise TypeError("not a bool")
        body.node(values)
        body.add(_bits([bool(v) for v in values]))


class Strings(Column):
    """string."""

    own_buffers = 3

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        encoded = [b"" if v is None else str.encode(v) for v in values]
        body.add(_offsets([len(e) for e in encoded]))
        body.add(b"".join(encoded))

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        data = b"" if value is None else str.encode(value)
        body.add(_PAIR.pack(0, len(data)))
        body.add(data)


class Structs(Column):
    """struct; a value is a dict."""

    def __init__(self, node: int, buffer: int, type_: pa.StructType) -> None:
        super().__init__(node, buffer)
        self.children: list[tuple[str, Column]] = []
        for field in type_:
            child = column_of(field.type, self.next_node, self.next_buffer, inner=True)
            self.children.append((field.name, child))
            self.next_node, self.next_buffer = child.next_node, child.next_buffer

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        for name, child in self.children:
            child.write(body, [None if v is None else v.get(name) for v in values])

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        for name, child in self.children:
            child.write_one(body, None if value is None else value.get(name))


class Lists(Column):
    """list of anything."""

    own_buffers = 2

    def __init__(self, node: int, buffer: int, item: pa.DataType) -> None:
        super().__init__(node, buffer)
        self.item = column_of(item, self.next_node, self.next_buffer, inner=True)
        self.next_node, self.next_buffer = self.item.next_node, self.item.next_buffer

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        lists = [() if v is None else v for v in values]
        body.add(_offsets([len(v) for v in lists]))
        self.item.write(body, [x for v in lists for x in v])

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        items = [] if value is None else list(value)
        body.add(_PAIR.pack(0, len(items)))
        self.item.write(body, items)


class NumberLists(Column):
    """list of numbers, as one numpy array; for a single row."""

    own_buffers = 2

    def __init__(self, node: int, buffer: int, item: pa.DataType) -> None:
        super().__init__(node, buffer)
        self.dtype = np.dtype(item.to_pandas_dtype())
        self.is_bool = pa.types.is_boolean(item)
        self.item = Numbers(self.next_node, self.next_buffer, "b")  # for its places only
        self.next_node, self.next_buffer = self.item.next_node, self.item.next_buffer

    def write_one(self, body: Body, value: Any) -> None:
        array = np.empty(0, self.dtype) if value is None else np.asarray(value)
        if array.ndim != 1 or (array.dtype != self.dtype and array.size):
            raise TypeError(f"{array.dtype} in a list of {self.dtype}")
        body.node_of(value)
        body.add(_PAIR.pack(0, len(array)))
        body.nodes += (len(array), 0)
        body.add(b"")
        body.add(np.packbits(array, bitorder="little").tobytes() if self.is_bool else array.tobytes())


_PAIR = struct.Struct("<ii")
_CODES = {pa.int32(): "i", pa.int64(): "q", pa.uint64(): "Q", pa.float64(): "d"}


def column_of(type_: pa.DataType, node: int, buffer: int, *, inner: bool = False) -> Column:
    """The column of an Arrow type at these places; `inner` when inside another. TypeError for one not known here."""
    if type_ in _CODES:
        return Numbers(node, buffer, _CODES[type_])
    if pa.types.is_boolean(type_):
        return Booleans(node, buffer)
    if pa.types.is_string(type_):
        return Strings(node, buffer)
    if pa.types.is_struct(type_):
        return Structs(node, buffer, type_)
    if pa.types.is_list(type_):
        numeric = is_numeric_list(type_) and not inner
        return (NumberLists if numeric else Lists)(node, buffer, type_.value_type)
    raise TypeError(f"no column for {type_}")


def is_numeric_list(type_: pa.DataType) -> bool:
    """True for lists of integers, floats or booleans."""
    if not pa.types.is_list(type_):
        return False
    item = type_.value_type
    return pa.types.is_integer(item) or pa.types.is_floating(item) or pa.types.is_boolean(item)


def _bits(flags: Sequence[bool]) -> bytes:
    if len(flags) == 1:
        return b"\1" if flags[0] else b"\0"
    packed = bytearray((len(flags) + 7) >> 3)
    for i, flag in enumerate(flags):
        packed[i >> 3] |= flag << (i & 7)
    return bytes(packed)


def _offsets(lengths: Sequence[int]) -> bytes:
    offsets, end = [0], 0
    for length in lengths:
        end += length
        offsets.append(end)
    return struct.pack(f"<{len(offsets)}i", *offsets)
