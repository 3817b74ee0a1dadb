"""The change of one range of a tensor as bytes: where it changed and what is there now, each the smallest of its forms.

where   gaps    unchanged elements before each changed one, as u8; 255 means "255 more, go on"
        bitmap  one bit for each element of the range
        all     nothing: there is a value for each element of the range, changed or not
what    steps   new bits - old bits as int8, modulo 2**16 (2**32); -128: take the next escape. Needs the exact base
        raw     new bits, one byte plane after the other, high bytes first

All are integer arithmetic on bit patterns, so -0.0, NaN payloads and denormals survive.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .errors import WeightUpdateError
from .frames import Buffer, deflate, inflate

_ESCAPE = -128
_MORE = 255


class Where(StrEnum):
    """How positions are written."""

    GAPS = "gaps"
    BITMAP = "bitmap"
    ALL = "all"


class What(StrEnum):
    """How values are written."""

    STEPS = "steps"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class Packed:
    """The change of one range; empty bytes where the form has no such buffer."""

    where: Where
    what: What
    nnz: int
    """Changed elements; every element of the range for `all`."""
    pos: Buffer
    val: Buffer
    esc: Buffer

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.pos) + len(self.val) + len(self.esc)


def pack(indices: np.ndarray, values: np.ndarray, old: np.ndarray) -> Packed:
    """The smallest form of: `old` (bits [size]) becomes `values` (bits [n]) at `indices` ([n] sorted, n > 0)."""
    options = [_sparse(indices, values, old)]
    if len(indices) * 2 > len(old):
        whole = old.copy()
        whole[indices] = values
        options.append(_dense(old, whole))
    return min(options, key=lambda p: p.size)


def unpack(packed: Packed, base: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """(positions, new bits) on top of `base` (bits of the range, flat); positions None: bits of the whole range.

    Raises WeightUpdateError for whatever does not fit the range; `base` is only read.
    """
    size, nnz = len(base), packed.nnz
    if not 0 < nnz <= size:
        raise WeightUpdateError("nnz", f"{nnz} changed elements of {size}")
    match packed.where:
        case Where.GAPS:
            indices = _from_gaps(inflate(packed.pos, at_most=nnz + size // _MORE), nnz, size)
        case Where.BITMAP:
            indices = _from_bitmap(inflate(packed.pos, exactly=-(-size // 8)), nnz, size)
        case Where.ALL:
            indices = None
            if nnz != size or len(packed.pos):
                raise WeightUpdateError("nnz", f"{nnz} of {size} elements written as all")
    old = base if indices is None else base[indices]
    if packed.what is What.RAW:
        if len(packed.esc):
            raise WeightUpdateError("escapes", "escapes beside raw values")
        return indices, _from_planes(inflate(packed.val, exactly=nnz * base.itemsize), base.dtype)
    return indices, _from_steps(packed, old)


def _sparse(indices: np.ndarray, values: np.ndarray, old: np.ndarray) -> Packed:
    where, pos = Where.GAPS, deflate(_gaps(indices))
    if len(pos) > len(old) // 8:
        where, pos = Where.BITMAP, deflate(_bitmap(indices, len(old)))
    what, val, esc = _smallest(old[indices], values)
    return Packed(where, what, len(indices), pos, val, esc)


def _dense(old: np.ndarray, whole: np.ndarray) -> Packed:
    what, val, esc = _smallest(old, whole)
    return Packed(Where.ALL, what, len(whole), b"", val, esc)


def _smallest(old: np.ndarray, new: np.ndarray) -> tuple[What, bytes, bytes]:
    steps, escaped = _steps(old, new)
    form = (What.STEPS, deflate(steps.tobytes()), deflate(_planes(escaped)))
    # Steps win by far while most changes are small, so the others are tried only when many are not.
    if len(escaped) * 8 > len(new):
        form = min(form, (What.RAW, deflate(_planes(new)), b""), key=lambda f: len(f[1]) + len(f[2]))
    return form


def _gaps(indices: np.ndarray) -> bytes:
    gaps = np.diff(indices, prepend=-1) - 1
    more, last = np.divmod(gaps, _MORE)
    ends = np.cumsum(more + 1) - 1
    out = np.full(int(ends[-1]) + 1, _MORE, dtype=np.uint8)
    out[ends] = last
    return out.tobytes()


def _from_gaps(data: bytes, nnz: int, size: int) -> np.ndarray:
    gaps = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(gaps != _MORE)
    if len(ends) != nnz or len(gaps) != ends[-1] + 1:
        raise WeightUpdateError("gaps", f"{len(ends)} positions, {nnz} announced")
    indices = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(nnz)
    if indices[-1] >= size:
        raise WeightUpdateError("index_out_of_range", f"position {indices[-1]} of {size}")
    return indices


def _bitmap(indices: np.ndarray, size: int) -> bytes:
    mask = np.zeros(size, dtype=bool)
    mask[indices] = True
    return np.packbits(mask, bitorder="little").tobytes()


def _from_bitmap(data: bytes, nnz: int, size: int) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little")
    indices = np.flatnonzero(bits)
    if len(indices) != nnz:
        raise WeightUpdateError("bitmap", f"{len(indices)} positions, {nnz} announced")
    if indices[-1] >= size:
        raise WeightUpdateError("index_out_of_range", f"position {indices[-1]} of {size}")
    return indices


def _steps(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    difference = (new - old).view(np.dtype(f"i{new.itemsize}"))
    large = (difference > 127) | (difference < -127)
    steps = np.where(large, _ESCAPE, difference).astype(np.int8)
    return steps, new[large]


def _from_steps(packed: Packed, old: np.ndarray) -> np.ndarray:
    steps = np.frombuffer(inflate(packed.val, exactly=len(old)), dtype=np.int8)
    bits = old + steps.astype(np.dtype(f"i{old.itemsize}")).view(old.dtype)
    escapes = np.flatnonzero(steps == _ESCAPE)
    if len(escapes):
        bits[escapes] = _from_planes(inflate(packed.esc, exactly=len(escapes) * old.itemsize), old.dtype)
    elif len(packed.esc):
        raise WeightUpdateError("escapes", "raw values that no step asks for")
    return bits


def _planes(bits: np.ndarray) -> bytes:
    big = bits.astype(bits.dtype.newbyteorder(">"))
    return np.ascontiguousarray(big.view(np.uint8).reshape(-1, bits.itemsize).T).tobytes()


def _from_planes(data: bytes, dtype: np.dtype) -> np.ndarray:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, -1)
    big = np.ascontiguousarray(planes.T).view(dtype.newbyteorder(">")).reshape(-1)
    return big.astype(dtype)
