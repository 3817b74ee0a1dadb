"""Columns of a record batch as bytes: one class per kind of Arrow type, compiled to the places of its node and buffers.

Reading checks what `validate(full=True)` checks (lengths, null counts, offsets, UTF-8) and refuses, with
LayoutError, what this module would not have written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa


class LayoutError(Exception):
    """Not the layout that is written here: ask pyarrow."""


class View(NamedTuple):
    """A batch to read: its bytes, where its body starts, its nodes and buffers as flat (a, b) pairs."""

    value: bytes
    base: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]


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

    def read(self, view: View, count: int) -> Sequence[Any]:
        """`count` values. Raises LayoutError."""
        raise NotImplementedError

    def read_one(self, view: View) -> Any:
        """The one value."""
        return self.read(view, 1)[0]

    def _is_null(self, view: View) -> bool:
        """Whether the one value is null."""
        at = self.node
        if view.nodes[at] != 1:
            raise LayoutError("other count")
        nulls, bitmap = view.nodes[at + 1], view.buffers[self.buffer + 1]
        if not nulls and not bitmap:
            return False
        if nulls != 1 or not bitmap or view.value[view.base + view.buffers[self.buffer]] & 1:
            raise LayoutError("other null count")
        return True

    def _valid(self, view: View, count: int) -> list[int] | None:
        """1 for a value, 0 for a null; None when there are no nulls."""
        length, nulls = view.nodes[self.node], view.nodes[self.node + 1]
        bitmap = view.buffers[self.buffer + 1]
        if length != count or (not nulls and bitmap):
            raise LayoutError("other count")
        if not nulls:
            return None
        if nulls < 0:
            raise LayoutError("unknown null count")
        if bitmap < (count + 7) >> 3:
            raise LayoutError("short bitmap")
        start = view.base + view.buffers[self.buffer]
        valid = [view.value[start + (i >> 3)] >> (i & 7) & 1 for i in range(count)]
        if count - sum(valid) != nulls:
            raise LayoutError("other null count")
        return valid

    def _start(self, view: View, buffer: int, size: int) -> int:
        """Where this column's buffer number `buffer` starts; it must hold `size` bytes."""
        at = self.buffer + 2 * buffer
        if view.buffers[at + 1] < size:
            raise LayoutError("short buffer")
        return view.base + view.buffers[at]


class Numbers(Column):
    """int32, int64, uint64 or float64."""

    own_buffers = 2

    def __init__(self, node: int, buffer: int, code: str) -> None:
        super().__init__(node, buffer)
        self._code, self._one, self._size = code, struct.Struct(f"<{code}"), struct.calcsize(f"<{code}")
        self._padded = struct.Struct(f"<{code}{8 - self._size}x")

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        body.add(struct.pack(f"<{len(values)}{self._code}", *[0 if v is None else v for v in values]))

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        body.buffers += (body.size, self._size)
        body.parts.append(self._padded.pack(0 if value is None else value))
        body.size += 8

    def read(self, view: View, count: int) -> Sequence[Any]:
        value, base, nodes, buffers = view
        at, node = self.buffer, self.node
        if buffers[at + 3] < count * self._size:
            raise LayoutError("short buffer")
        found = _many(count, self._code).unpack_from(value, base + buffers[at + 2])
        if nodes[node] == count and not nodes[node + 1] and not buffers[at + 1]:
            return found
        return _masked(found, self._valid(view, count))

    def read_one(self, view: View) -> Any:
        value, base, nodes, buffers = view
        at, node = self.buffer, self.node
        if buffers[at + 3] < self._size:
            raise LayoutError("short buffer")
        found = self._one.unpack_from(value, base + buffers[at + 2])[0]
        if nodes[node] == 1 and not nodes[node + 1] and not buffers[at + 1]:
            return found
        return None if self._is_null(view) else found


class Booleans(Column):
    """bool."""

    own_buffers = 2

    def write(self, body: Body, values: Sequence[Any]) -> None:
        if not all(v is None or isinstance(v, bool | np.bool_) for v in values):
            raise TypeError("not a bool")
        body.node(values)
        body.add(_bits([bool(v) for v in values]))

    def read(self, view: View, count: int) -> Sequence[Any]:
        valid = self._valid(view, count)
        start = self._start(view, 1, (count + 7) >> 3)
        return _masked([bool(view.value[start + (i >> 3)] >> (i & 7) & 1) for i in range(count)], valid)


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

    def read(self, view: View, count: int) -> Sequence[Any]:
        if count == 1:
            return (self.read_one(view),)
        value, base, nodes, buffers = view
        at, node = self.buffer, self.node
        offsets = _read_offsets(view, self._start(view, 1, 4 * (count + 1)), count)
        if buffers[at + 5] < offsets[-1]:
            raise LayoutError("short buffer")
        start = base + buffers[at + 4]
        found = []
        for i in range(count):
            found.append(value[start + offsets[i] : start + offsets[i + 1]].decode())
        if nodes[node] == count and not nodes[node + 1] and not buffers[at + 1]:
            return found
        return _masked(found, self._valid(view, count))

    def read_one(self, view: View) -> Any:
        value, base, nodes, buffers = view
        at, node = self.buffer, self.node
        if buffers[at + 3] < 8:
            raise LayoutError("short buffer")
        first, end = _PAIR.unpack_from(value, base + buffers[at + 2])
        if first or not 0 <= end <= buffers[at + 5]:
            raise LayoutError("other offsets")
        start = base + buffers[at + 4]
        text = value[start : start + end].decode()
        if nodes[node] == 1 and not nodes[node + 1] and not buffers[at + 1]:
            return text
        return None if self._is_null(view) else text


class Structs(Column):
    """struct; a value is a dict."""

    def __init__(self, node: int, buffer: int, type_: pa.StructType) -> None:
        super().__init__(node, buffer)
        self._children: list[tuple[str, Column]] = []
        for field in type_:
            child = column_of(field.type, self.next_node, self.next_buffer, inner=True)
            self._children.append((field.name, child))
            self.next_node, self.next_buffer = child.next_node, child.next_buffer
        self._names = [name for name, _ in self._children]

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        for name, child in self._children:
            child.write(body, [None if v is None else v.get(name) for v in values])

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        for name, child in self._children:
            child.write_one(body, None if value is None else value.get(name))

    def read(self, view: View, count: int) -> Sequence[Any]:
        if count == 1:
            return (self.read_one(view),)
        columns = [child.read(view, count) for _, child in self._children]
        names = self._names
        found = [dict(zip(names, row)) for row in zip(*columns)]  # noqa: B905
        return _masked(found, self._valid(view, count))

    def read_one(self, view: View) -> Any:
        found = {name: child.read_one(view) for name, child in self._children}
        return None if self._is_null(view) else found


class Lists(Column):
    """list of anything."""

    own_buffers = 2

    def __init__(self, node: int, buffer: int, item: pa.DataType) -> None:
        super().__init__(node, buffer)
        self._item = column_of(item, self.next_node, self.next_buffer, inner=True)
        self.next_node, self.next_buffer = self._item.next_node, self._item.next_buffer

    def write(self, body: Body, values: Sequence[Any]) -> None:
        body.node(values)
        lists = [() if v is None else v for v in values]
        body.add(_offsets([len(v) for v in lists]))
        self._item.write(body, [x for v in lists for x in v])

    def write_one(self, body: Body, value: Any) -> None:
        body.node_of(value)
        items = [] if value is None else list(value)
        body.add(_PAIR.pack(0, len(items)))
        self._item.write(body, items)

    def read(self, view: View, count: int) -> Sequence[Any]:
        valid = self._valid(view, count)
        offsets = _read_offsets(view, self._start(view, 1, 4 * (count + 1)), count)
        if view.nodes[self._item.node] != offsets[-1]:
            raise LayoutError("other child length")
        items = self._item.read(view, offsets[-1])
        return _masked([items[a:b] for a, b in pairwise(offsets)], valid)

    def read_one(self, view: View) -> Any:
        first, count = _PAIR.unpack_from(view.value, self._start(view, 1, 8))
        if first or count < 0 or view.nodes[self._item.node] != count:
            raise LayoutError("other offsets")
        items = list(self._item.read(view, count))
        return None if self._is_null(view) else items


class NumberLists(Column):
    """list of numbers, as one numpy array; for a single row."""

    own_buffers = 2

    def __init__(self, node: int, buffer: int, item: pa.DataType) -> None:
        super().__init__(node, buffer)
        self._dtype = np.dtype(item.to_pandas_dtype())
        self._is_bool = pa.types.is_boolean(item)
        self._item = Numbers(self.next_node, self.next_buffer, "b")  # for its places only
        self.next_node, self.next_buffer = self._item.next_node, self._item.next_buffer

    def write_one(self, body: Body, value: Any) -> None:
        array = np.empty(0, self._dtype) if value is None else np.asarray(value)
        if array.ndim != 1 or (array.dtype != self._dtype and array.size):
            raise TypeError(f"{array.dtype} in a list of {self._dtype}")
        body.node_of(value)
        body.add(_PAIR.pack(0, len(array)))
        body.nodes += (len(array), 0)
        body.add(b"")
        body.add(np.packbits(array, bitorder="little").tobytes() if self._is_bool else array.tobytes())

    def read_one(self, view: View) -> np.ndarray | None:
        first, count = _PAIR.unpack_from(view.value, self._start(view, 1, 8))
        if first or count < 0 or self._item._valid(view, count) is not None:
            raise LayoutError("other offsets, or nulls inside")
        if self._is_bool:
            at = self._item._start(view, 1, (count + 7) >> 3)
            packed = np.frombuffer(view.value, np.uint8, (count + 7) >> 3, at)
            array = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
            array.flags.writeable = False
        else:
            at = self._item._start(view, 1, count * self._dtype.itemsize)
            array = np.frombuffer(view.value, self._dtype, count, at)
        return None if self._is_null(view) else array


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


@lru_cache(maxsize=1024)
def _many(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


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


def _read_offsets(view: View, start: int, count: int) -> tuple[int, ...]:
    offsets: tuple[int, ...] = _many(count + 1, "i").unpack_from(view.value, start)
    if offsets[0] or list(offsets) != sorted(offsets):
        raise LayoutError("other offsets")
    return offsets


def _masked(values: Sequence[Any], valid: list[int] | None) -> Sequence[Any]:
    if valid is None:
        return values
    return [v if ok else None for v, ok in zip(values, valid, strict=True)]
