"""The reader of a schema's rows, as a function generated for it: a record is read in as many microseconds as it has columns.

`reader_of` writes straight-line Python for the columns of one schema and compiles it, once per schema; called
through objects the same steps take twice as long. It checks what `validate(full=True)` checks (lengths, null
counts, offsets, sizes, UTF-8) and refuses, with LayoutError, what would not have been written here.

In the generated code: `v` the stream, `s` where the body starts, `n` the nodes and `b` the buffers as flat pairs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from .row_columns import Booleans, Column, Lists, NumberLists, Numbers, Strings, Structs

Reader = Callable[[bytes, int, tuple[int, ...], tuple[int, ...]], dict[str, Any]]


class LayoutError(Exception):
    """Not the layout that is written here: ask pyarrow."""


def reader_of(columns: Sequence[tuple[str, Column]]) -> Reader:
    """A function (stream, start of the body, nodes, buffers) -> row. The buffers must lie inside the stream.

    It raises LayoutError, struct.error or UnicodeDecodeError for another layout.
    """
    code = _Code()
    named = [(name, code.one(column)) for name, column in columns]
    code.line(f"return {{{', '.join(f'{name!r}: {value}' for name, value in named)}}}")
    names: dict[str, Any] = dict(code.names)
    exec(compile("def read(v, s, n, b):\n" + "\n".join(code.lines), "<row reader>", "exec"), names)
    read: Reader = names["read"]
    return read


class _Code:
    """Lines of the function, and what they refer to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "LayoutError": LayoutError,
            "pair": struct.Struct("<ii").unpack_from,
            "many": _many,
            "masked": _masked,
            "masked_one": _masked_one,
            "bits": _bits,
            "flags": _flags,
            "strings": _strings,
            "offsets": _offsets,
            "pairwise": pairwise,
            "numbers": np.frombuffer,
        }

    def line(self, text: str) -> None:
        self.lines.append("    " + text)

    def known(self, name: str, value: Any) -> str:
        self.names[name] = value
        return name

    def refuse_if(self, condition: str) -> None:
        self.line(f"if {condition}: raise LayoutError")

    def one(self, c: Column) -> str:
        """The name of the variable that has the column's one value."""
        x, i, b = f"x{c.node}", c.node, c.buffer
        if isinstance(c, Numbers):
            unpack = self.known(f"unpack_{c.code}", struct.Struct(f"<{c.code}").unpack_from)
            self.refuse_if(f"b[{b + 3}] < {c.size}")
            self.line(f"{x} = {unpack}(v, s + b[{b + 2}])[0]")
        elif isinstance(c, Booleans):
            self.refuse_if(f"b[{b + 3}] < 1")
            self.line(f"{x} = v[s + b[{b + 2}]] & 1 == 1")
        elif isinstance(c, Strings):
            self._length(c)
            self.refuse_if(f"k{i} > b[{b + 5}]")
            self.line(f"{x} = v[s + b[{b + 4}] : s + b[{b + 4}] + k{i}].decode()")
        elif isinstance(c, Structs):
            children = [(name, self.one(child)) for name, child in c.children]
            self.line(f"{x} = {{{', '.join(f'{name!r}: {value}' for name, value in children)}}}")
        elif isinstance(c, Lists):
            self._length(c)
            self.line(f"{x} = list({self.many(c.item, f'k{i}')})")
        elif isinstance(c, NumberLists):
            self._number_list(c, x)
        self.line(f"if n[{i}] != 1 or n[{i + 1}] or b[{b + 1}]: {x} = masked_one(v, s, n, b, {i}, {b}, {x})")
        return x

    def many(self, c: Column, count: str) -> str:
        """The name of the variable that has the column's `count` values, a sequence."""
        x, i, b = f"x{c.node}", c.node, c.buffer
        if isinstance(c, Numbers):
            self.refuse_if(f"b[{b + 3}] < {count} * {c.size}")
            self.line(f"{x} = many({count}, {c.code!r}).unpack_from(v, s + b[{b + 2}])")
        elif isinstance(c, Booleans):
            self.line(f"{x} = bits(v, s, b, {b + 2}, {count})")
        elif isinstance(c, Strings):
            self.line(f"{x} = strings(v, s, b, {b}, {count})")
        elif isinstance(c, Structs):
            children = [(name, self.many(child, count)) for name, child in c.children]
            fields = ", ".join(f"{name!r}: y{k}" for k, (name, _) in enumerate(children))
            each = "".join(f"y{k}, " for k in range(len(children)))
            values = ", ".join(value for _, value in children)
            self.line(f"{x} = [{{{fields}}} for {each}in zip({values})]")
        elif isinstance(c, Lists):
            self.line(f"o{i} = offsets(v, s, b, {b}, {count})")
            self.line(f"k{i} = o{i}[-1]")
            items = self.many(c.item, f"k{i}")
            self.line(f"{x} = [list({items}[p:q]) for p, q in pairwise(o{i})]")
        self.line(f"if n[{i}] != {count} or n[{i + 1}] or b[{b + 1}]:")
        self.line(f"    {x} = masked(v, s, n, b, {i}, {b}, {count}, {x})")
        return x

    def _length(self, c: Column) -> None:
        """`k<node>`: how long the one string or list is."""
        self.refuse_if(f"b[{c.buffer + 3}] < 8")
        self.line(f"o, k{c.node} = pair(v, s + b[{c.buffer + 2}])")
        self.refuse_if(f"o or k{c.node} < 0")

    def _number_list(self, c: NumberLists, x: str) -> None:
        self._length(c)
        k, i, b = f"k{c.node}", c.item.node, c.item.buffer
        self.refuse_if(f"n[{i}] != {k} or n[{i + 1}] or b[{b + 1}]")
        if c.is_bool:
            self.refuse_if(f"b[{b + 3}] < {k} + 7 >> 3")
            self.line(f"{x} = flags(v, s + b[{b + 2}], {k})")
        else:
            dtype = self.known(f"dtype_{c.dtype.name}", c.dtype)
            self.refuse_if(f"b[{b + 3}] < {k} * {c.dtype.itemsize}")
            self.line(f"{x} = numbers(v, {dtype}, {k}, s + b[{b + 2}])")


@lru_cache(maxsize=1024)
def _many(count: int, code: str) -> struct.Struct:
    return struct.Struct(f"<{count}{code}")


def _flags(v: bytes, start: int, count: int) -> np.ndarray:
    packed = np.frombuffer(v, np.uint8, (count + 7) >> 3, start)
    array = np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)
    array.flags.writeable = False
    return array


def _bits(v: bytes, s: int, b: tuple[int, ...], at: int, count: int) -> list[bool]:
    """Bits of the buffer at `at`."""
    if b[at + 1] < (count + 7) >> 3:
        raise LayoutError
    start = s + b[at]
    return [v[start + (i >> 3)] >> (i & 7) & 1 == 1 for i in range(count)]


def _offsets(v: bytes, s: int, b: tuple[int, ...], at: int, count: int) -> tuple[int, ...]:
    """`count` + 1 offsets that start at 0 and do not fall."""
    if b[at + 3] < 4 * (count + 1):
        raise LayoutError
    found: tuple[int, ...] = _many(count + 1, "i").unpack_from(v, s + b[at + 2])
    if found[0] or list(found) != sorted(found):
        raise LayoutError
    return found


def _strings(v: bytes, s: int, b: tuple[int, ...], at: int, count: int) -> list[str]:
    offsets = _offsets(v, s, b, at, count)
    if b[at + 5] < offsets[-1]:
        raise LayoutError
    start = s + b[at + 4]
    return [v[start + p : start + q].decode() for p, q in pairwise(offsets)]


def _masked(
    v: bytes, s: int, n: tuple[int, ...], b: tuple[int, ...], node: int, at: int, count: int, values: Any
) -> list[Any]:
    """`values` with None where the bitmap says so."""
    nulls = n[node + 1]
    if n[node] != count or nulls <= 0:
        raise LayoutError
    valid = _bits(v, s, b, at, count)
    if count - sum(valid) != nulls:
        raise LayoutError
    return [value if ok else None for value, ok in zip(values, valid, strict=True)]


def _masked_one(
    v: bytes, s: int, n: tuple[int, ...], b: tuple[int, ...], node: int, at: int, value: Any
) -> None:
    if n[node] != 1 or n[node + 1] != 1 or not b[at + 1] or v[s + b[at]] & 1:
        raise LayoutError
