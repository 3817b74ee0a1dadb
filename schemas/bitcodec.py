"""The change of one range of a tensor as bytes: where it changed and what is there now, each the smallest of its forms.

where   gaps, bitmap (positions.py), or all: a value for each element of the range, changed or not
what    steps    one byte for three small steps (steps.py); needs the exact base
        planes   byte planes of new bits - old bits (planes.py); needs the exact base
        raw      byte planes of the new bits

All are integer arithmetic on bit patterns, so -0.0, NaN payloads and denormals survive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from . import planes, positions, steps
from .dtypes import Dtype
from .errors import WeightUpdateError
from .frames import Buffer, deflate

_SAMPLE = 1 << 13
"""Changed elements by which the form is chosen."""


class Where(StrEnum):
    """How positions are written."""

    GAPS = "gaps"
    BITMAP = "bitmap"
    ALL = "all"


class What(StrEnum):
    """How values are written."""

    STEPS = "steps"
    PLANES = "planes"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class Packed:
    """The change of one range."""

    where: Where
    what: What
    nnz: int
    """Changed elements; every element of the range for `all`."""
    split: int
    """See steps.py; 0 where there is none."""
    frames: tuple[Buffer, ...]
    """zstd frames, empty where there is nothing: of the positions, then of the values."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(frame) for frame in self.frames)


def pack(indices: np.ndarray, values: np.ndarray, old: np.ndarray, dtype: Dtype) -> Packed:
    """The smallest form of: `old` (bits [size]) becomes `values` (bits [n]) at `indices` ([n] sorted, n > 0).

    Every value differs from the old one. Of a large change a run in its middle decides the form.
    """
    middle = slice(max(0, (len(indices) - _SAMPLE) // 2), (len(indices) + _SAMPLE) // 2)
    first, last = int(indices[middle][0]), int(indices[middle][-1])
    if len(indices) <= _SAMPLE:
        first, last = 0, len(old) - 1
    some, new, around = indices[middle] - first, values[middle], old[first : last + 1]
    forms = _forms(some, new, around, dtype)
    if len(forms) == 1:
        return _write(*forms[0], indices, values, old, dtype)
    options = [_write(*form, some, new, around, dtype) for form in forms]
    best = min(options, key=lambda p: p.size)
    if len(indices) <= _SAMPLE:
        return best
    if best.where is Where.ALL and best.what is What.STEPS and len(indices) < len(old):
        return _write(Where.BITMAP, What.STEPS, best.split, indices, values, old, dtype)
    return _write(best.where, best.what, best.split, indices, values, old, dtype)


def unpack(
    packed: Packed, base: np.ndarray, dtype: Dtype
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
    """(positions, old bits there, new bits) on top of `base` (bits of the range, flat); positions None: bits of the whole range.

    Raises WeightUpdateError for whatever does not fit the range; `base` is only read.
    """
    size, nnz = len(base), packed.nnz
    if not 0 < nnz <= size:
        raise WeightUpdateError("nnz", f"{nnz} changed elements of {size}")
    values = {What.STEPS: 4 + dtype.bits.itemsize}.get(packed.what, dtype.bits.itemsize)
    if len(packed.frames) != 1 + values:
        raise WeightUpdateError("frames", f"{len(packed.frames)} buffers, expected {1 + values}")
    indices: np.ndarray | None
    match packed.where:
        case Where.GAPS:
            indices = positions.from_gaps(packed.frames[0], nnz, size)
        case Where.BITMAP:
            indices = positions.from_bitmap(packed.frames[0], nnz, size)
        case Where.ALL:
            indices = None
            if nnz != size or len(packed.frames[0]):
                raise WeightUpdateError("nnz", f"{nnz} of {size} elements written as all")
    old = base if indices is None else base[indices]
    frames = packed.frames[1:]
    match packed.what:
        case What.RAW:
            bits = planes.from_planes(frames, nnz, base.dtype)
        case What.PLANES:
            bits = planes.from_differences(frames, old)
        case What.STEPS:
            bits = steps.from_steps(frames, old, dtype, packed.split)
    return indices, old, bits


def _forms(
    indices: np.ndarray, values: np.ndarray, old: np.ndarray, dtype: Dtype
) -> list[tuple[Where, What, int]]:
    """Every form, with its split, that may be the smallest."""
    n, size = len(indices), len(old)
    before = old[indices]
    split = steps.best_split(before, values, dtype)
    whats = [What.STEPS]
    # Steps win by far while most changes are small, so the others are tried only when many are not.
    far = np.abs((values - before).view(np.dtype(f"i{old.itemsize}"))).view(old.dtype) > 15
    if np.count_nonzero(far) * 4 > n:
        whats += [What.PLANES, What.RAW]
    sparse = [Where.GAPS] if n * 8 < size else [Where.GAPS, Where.BITMAP]
    wheres = [Where.ALL] if n == size else sparse
    found = [(where, what, split) for where in wheres for what in whats]
    if size > n > size // 2:
        found += [(Where.ALL, what, 0) for what in (What.PLANES, What.RAW)]
    return found


def _write(
    where: Where,
    what: What,
    split: int,
    indices: np.ndarray,
    values: np.ndarray,
    old: np.ndarray,
    dtype: Dtype,
) -> Packed:
    match where:
        case Where.GAPS:
            pos = deflate(positions.to_gaps(indices))
        case Where.BITMAP:
            pos = deflate(positions.to_bitmap(indices, len(old)))
        case Where.ALL:
            pos = b""
            whole = old.copy()
            whole[indices] = values
            values = whole
    before = old if where is Where.ALL else old[indices]
    match what:
        case What.STEPS:
            frames = steps.to_steps(before, values, dtype, split)
        case What.PLANES:
            frames = planes.to_differences(before, values)
        case What.RAW:
            frames = planes.to_planes(values)
    return Packed(where, what, len(values), split if what is What.STEPS else 0, (pos, *frames))
