"""fp32 masters against the bits that everybody else holds: what a cast would change, without a full temporary.

Rounding is to nearest, ties to even, in integer arithmetic; a NaN stays a NaN (bf16: quiet, its high payload
kept). On all other values it equals torch's and IEEE's.
"""

from __future__ import annotations

import numpy as np

from .dtypes import Dtype

CHUNK = 1 << 16
"""Elements looked at together: the temporaries stay in the cache."""
_NAN_ABOVE = np.uint32(0x7F800000)


def rounded(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    """float32 [n] -> bit patterns [n] of `dtype`."""
    if dtype is Dtype.FP32:
        return values.view(np.uint32)
    if dtype is Dtype.FP16:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint16)
    x = values.view(np.uint32)
    high = x >> np.uint32(16)
    bits = ((x + ((high & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = (x & np.uint32(0x7FFFFFFF)) > _NAN_ABOVE
    if nan.any():
        bits[nan] = (high[nan] | np.uint32(0x40)).astype(np.uint16)
    return bits


def changed(old: np.ndarray, new: np.ndarray, dtype: Dtype) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions (int64, sorted) where `new` differs from the bits `old`, and its bits there.

    `old`: bit patterns [n] of `dtype`. `new`: bit patterns of it too, or float32 [n] that is rounded to it.
    """
    found, bits = [], []
    for at in range(0, len(old), CHUNK):
        a, b = old[at : at + CHUNK], new[at : at + CHUNK]
        if b.dtype != np.float32:
            where = np.flatnonzero(a != b)
            values = b[where]
        elif dtype is Dtype.BF16:
            where, values = _rounds_elsewhere(a, b)
        else:
            b = rounded(b, dtype)
            where = np.flatnonzero(a != b)
            values = b[where]
        found.append(where + at)
        bits.append(values)
    if not found:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=old.dtype)
    return np.concatenate(found), np.concatenate(bits)


def _rounds_elsewhere(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`changed` of one chunk for bf16: whatever lies within half a step of its old bits need not be rounded."""
    middle = np.full((len(old), 2), 0x8000, dtype=np.uint16)
    middle[:, 1] = old
    distance = new.view(np.uint32) - middle.view("<u4")[:, 0]
    # A NaN's bits may wrap around to look near; the largest element is a NaN if any is.
    with np.errstate(invalid="ignore"):
        nan = bool(np.isnan(new.max()))
    where = np.arange(len(old)) if nan else np.flatnonzero(distance < np.uint32(0xFFFF0001))
    bits = rounded(new[where], Dtype.BF16)
    differs = bits != old[where]
    if differs.all():  # all but exact ties
        return where, bits
    return where[differs], bits[differs]
