"""Tensors, one at a time, become the rows of a delta: no second copy of the model, no cast of a whole tensor.

A tensor is worked on in segments, each one row or more, so that threads share a large tensor and the temporaries
are those of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from .bitcodec import Packed, pack
from .delta_rows import Header, Row, RowWriter
from .dtypes import Dtype, dtype_of
from .errors import WeightUpdateError
from .parallel import ordered_map
from .rounding import changed
from .weight_hash import MASK, entry_hash, tensor_hash, update_hash

SEGMENT = 1 << 22
"""Elements that are worked on together."""
_BLOCK = 1 << 19
_ROW_CHANGES = 1 << 17
"""A row ends with the block in which it has so many changed elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One tensor, or one shard of it, before and after."""

    name: str
    old: np.ndarray
    """Its bits, C-contiguous; whole tensors in their shape."""
    new: np.ndarray
    """Bits of the same format, or float32 that is rounded to it; as many elements as `old`."""
    dtype: Dtype | None = None
    """None: bf16 for uint16, fp32 for uint32."""
    shape: tuple[int, ...] | None = None
    """Of the whole tensor, where `old` is a shard of it."""
    flat_offset: int = 0
    """Where in the whole tensor, flat, the shard begins."""
    base_hash: int | None = None
    """Tensor hash of `old` where it is known (of a shard: at its positions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaTotals:
    """What was written."""

    changed: int
    """Elements."""
    elements: int
    base_hash: int | None
    """Set hash (uint64) of the old; None in a shard."""
    weights_hash: int | None
    """Set hash of the new; None in a shard."""
    base_hashes: Mapping[str, int]
    """Tensor hash of everything old that was held: all of a tensor, or this shard's part of it."""
    hashes: Mapping[str, int]
    """The same of the new; those of all shards sum up to the tensors' (`sum_hashes`)."""


@dataclass(frozen=True, slots=True)
class _Segment:
    change: Change
    dtype: Dtype
    start: int
    old: np.ndarray
    new: np.ndarray
    last: bool


@dataclass(frozen=True, slots=True)
class _Coded:
    rows: tuple[tuple[int, int, Packed], ...]
    """(where in the segment it begins, elements, what changed there)"""
    changed: int
    base_hash: int
    step: int
    """new hash - old hash."""


def write_delta(
    sink: BinaryIO,
    changes: Iterable[Change],
    *,
    base_version: int,
    version: int,
    shard: int = 0,
    shards: int = 1,
    threads: int = 1,
    update_old: bool = False,
) -> DeltaTotals:
    """Write what leads from the old to the new of `changes` to `sink`, tensor by tensor. Raises WeightUpdateError.

    `shards` > 1: this is one rank's part, and none of its hashes is the whole model's. `update_old`: write the new
    bits into the old arrays on the way, so that nobody holds both; after an error they are neither.
    """
    writer = RowWriter(sink, Header(base_version=base_version, version=version, shard=shard, shards=shards))
    base_hashes: dict[str, int] = {}
    hashes: dict[str, int] = {}
    count = elements = base_total = new_total = 0
    held: list[tuple[_Segment, _Coded]] = []

    def work(segment: _Segment) -> _Coded:
        return _code(segment, update_old)

    for segment, coded in ordered_map(work, _segments(changes), threads):
        held.append((segment, coded))
        if not segment.last:
            continue
        change, shape = segment.change, _shape(segment.change)
        if change.name in hashes:
            raise WeightUpdateError("duplicate_tensor", change.name)
        base = change.base_hash if change.base_hash is not None else sum(c.base_hash for _, c in held) & MASK
        new = (base + sum(c.step for _, c in held)) & MASK
        for part, c in held:
            for start, length, packed in c.rows:
                writer.write(_row(part, start, length, packed, base, new))
        base_hashes[change.name], hashes[change.name] = base, new
        base_total += entry_hash(change.name, shape, base)
        new_total += entry_hash(change.name, shape, new)
        count += sum(c.changed for _, c in held)
        elements += change.old.size
        held = []
    whole = shards == 1
    totals = (base_total & MASK, new_total & MASK) if whole else (None, None)
    writer.close(*totals)
    return DeltaTotals(
        changed=count,
        elements=elements,
        base_hash=totals[0],
        weights_hash=totals[1],
        base_hashes=base_hashes,
        hashes=hashes,
    )


def _segments(changes: Iterable[Change]) -> Iterator[_Segment]:
    for change in changes:
        given = {} if change.dtype is None else {change.name: change.dtype}
        dtype, shape = dtype_of(change.name, change.old, given), _shape(change)
        size = change.old.size
        if change.new.shape != change.old.shape:
            raise WeightUpdateError(
                "shape", f"{change.name} is {list(change.old.shape)}, given {list(change.new.shape)}"
            )
        if change.new.dtype not in (change.old.dtype, np.dtype(np.float32)):
            raise WeightUpdateError("dtype", f"{change.name} is {change.old.dtype}, given {change.new.dtype}")
        whole = math.prod(shape)
        if not 0 <= change.flat_offset <= whole - size or (change.shape is None and size != whole):
            raise WeightUpdateError(
                "shape", f"{change.name} is {list(shape)}: no room for {size} at {change.flat_offset}"
            )
        old, new = change.old.reshape(-1), change.new.reshape(-1)
        for start in range(0, max(size, 1), SEGMENT):
            part = slice(start, start + SEGMENT)
            yield _Segment(change, dtype, start, old[part], new[part], start + SEGMENT >= size)


def _code(segment: _Segment, update_old: bool) -> _Coded:
    old, dtype = segment.old, segment.dtype
    start = segment.change.flat_offset + segment.start
    base_hash = tensor_hash(old, dtype, start) if segment.change.base_hash is None else 0
    rows: list[tuple[int, int, Packed]] = []
    found: list[tuple[np.ndarray, np.ndarray]] = []
    begin = count = held = step = 0
    for at in range(0, len(old), _BLOCK):
        end = min(at + _BLOCK, len(old))
        indices, values = changed(old[at:end], segment.new[at:end], dtype)
        indices += at - begin
        found.append((indices, values))
        held += len(indices)
        if held < _ROW_CHANGES and end < len(old):
            continue
        if held:
            indices, values = (np.concatenate(both) for both in zip(*found, strict=True))
            before = old[begin:end]
            step += update_hash(0, indices, before[indices], values, dtype, start + begin)
            rows.append((begin, end - begin, pack(indices, values, before, dtype)))
            if update_old:
                before[indices] = values
        begin, count, held, found = end, count + held, 0, []
    return _Coded(tuple(rows), count, base_hash, step)


def _row(segment: _Segment, start: int, length: int, packed: Packed, base_hash: int, new_hash: int) -> Row:
    return Row(
        name=segment.change.name,
        dtype=segment.dtype,
        shape=_shape(segment.change),
        flat_offset=segment.change.flat_offset + segment.start + start,
        length=length,
        packed=packed,
        base_hash=base_hash,
        new_hash=new_hash,
    )


def _shape(change: Change) -> tuple[int, ...]:
    return tuple(change.old.shape if change.shape is None else change.shape)
