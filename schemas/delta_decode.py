"""The rows of a delta become patches of tensors, each checked against the base that it goes on; nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .bitcodec import unpack
from .delta_rows import Row
from .dtypes import Dtypes, dtype_of
from .errors import WeightUpdateError
from .parallel import ordered_map
from .update import TensorPatch, Weights, expect, unknown_tensor
from .weight_hash import MASK, update_hash

_DENSE = 5
"""Where more than a fifth changed, the whole tensor is smaller than positions of 8 bytes."""


@dataclass(frozen=True, slots=True)
class _Task:
    row: Row
    base: np.ndarray
    whole: bool
    last: bool


@dataclass(frozen=True, slots=True)
class _Part:
    row: Row
    indices: np.ndarray | None
    """In the whole tensor; None: all of the row's range."""
    bits: np.ndarray
    step: int
    """New hash - old hash."""


def decode_rows(
    rows: Iterable[Row],
    base: Weights,
    base_hashes: Mapping[str, int],
    *,
    dtypes: Dtypes | None,
    whole: bool,
    threads: int,
) -> Iterator[tuple[TensorPatch, int]]:
    """(patch, tensor hash afterwards) for each tensor, in the order of the rows. Raises WeightUpdateError.

    `whole`: the writer held whole tensors; else shards of them, and the patches always list positions.
    """
    parts: list[_Part] = []
    tasks = _tasks(rows, base, base_hashes, dtypes, whole)
    for task, part in ordered_map(_unpack, tasks, threads):
        parts.append(part)
        if not task.last:
            continue
        row = task.row
        step = sum(p.step for p in parts) & MASK
        expect("tensor_hash", (row.base_hash + step) & MASK, row.new_hash, row.name)
        yield _joined(parts, base[row.name], whole), (base_hashes[row.name] + step) & MASK
        parts = []


def _tasks(
    rows: Iterable[Row],
    base: Weights,
    hashes: Mapping[str, int],
    dtypes: Dtypes | None,
    whole: bool,
) -> Iterator[_Task]:
    """Rows that fit their tensors; a tensor's rows follow each other in ascending ranges."""
    seen: set[str] = set()
    before: Row | None = None
    for row in rows:
        if before is None or row.name != before.name:
            if before is not None:
                yield _task(before, base, whole, last=True)
            if row.name in seen:
                raise WeightUpdateError("duplicate_tensor", row.name)
            seen.add(row.name)
            _check_row(row, base, dtypes)
            if whole:
                expect("tensor_base_hash", row.base_hash, hashes[row.name], row.name)
        else:
            yield _task(before, base, whole, last=False)
            _check_row(row, base, dtypes)
            if row.flat_offset < before.flat_offset + before.length:
                raise WeightUpdateError("duplicate_tensor", f"{row.name}: two rows for one range")
            expect("tensor_base_hash", row.base_hash, before.base_hash, row.name)
            expect("tensor_hash", row.new_hash, before.new_hash, row.name)
        before = row
    if before is not None:
        yield _task(before, base, whole, last=True)


def _task(row: Row, base: Weights, whole: bool, *, last: bool) -> _Task:
    part = base[row.name].reshape(-1)[_range(row)]
    return _Task(row, part, whole, last)


def _check_row(row: Row, base: Weights, dtypes: Dtypes | None) -> None:
    name = row.name
    if name not in base:
        raise WeightUpdateError("unknown_tensor", unknown_tensor(name, base))
    known = dtype_of(name, base[name], dtypes)
    if row.dtype is not known:
        raise WeightUpdateError("dtype", f"{name} is {known}, the delta says {row.dtype}")
    if row.shape != base[name].shape:
        raise WeightUpdateError(
            "shape", f"{name} is {list(base[name].shape)}, the delta says {list(row.shape)}"
        )
    if not 0 < row.length <= math.prod(row.shape) - row.flat_offset:
        raise WeightUpdateError("shape", f"{name}: {row.length} elements at {row.flat_offset} do not fit")


def _unpack(task: _Task) -> _Part:
    row, base = task.row, task.base
    try:
        indices, old, bits = unpack(row.packed, base, row.dtype)
    except WeightUpdateError as e:
        raise WeightUpdateError(e.reason, f"{row.name}: {e.detail}") from None
    if indices is None:
        where = np.flatnonzero(old != bits)
        step = update_hash(0, where, old[where], bits[where], row.dtype, row.flat_offset)
        return _Part(row, None, bits, step)
    step = update_hash(0, indices, old, bits, row.dtype, row.flat_offset)
    if task.whole and len(indices) * _DENSE > len(base):
        range_bits = base.copy()
        range_bits[indices] = bits
        return _Part(row, None, range_bits, step)
    indices += row.flat_offset
    return _Part(row, indices, bits, step)


def _joined(parts: list[_Part], base: np.ndarray, whole: bool) -> TensorPatch:
    row = parts[0].row
    if whole and sum(len(p.bits) for p in parts) * _DENSE > base.size:
        bits = base.reshape(-1).copy()
        for p in parts:
            bits[_range(p.row) if p.indices is None else p.indices] = p.bits
        return TensorPatch(name=row.name, shape=row.shape, indices=None, bits=bits, dtype=row.dtype)
    indices = [
        np.arange(p.row.flat_offset, p.row.flat_offset + p.row.length) if p.indices is None else p.indices
        for p in parts
    ]
    return TensorPatch(
        name=row.name,
        shape=row.shape,
        indices=indices[0] if len(parts) == 1 else np.concatenate(indices),
        bits=parts[0].bits if len(parts) == 1 else np.concatenate([p.bits for p in parts]),
        dtype=row.dtype,
    )


def _range(row: Row) -> slice:
    return slice(row.flat_offset, row.flat_offset + row.length)
