"""fp32 masters against the bits that everybody else holds: what a cast would change, without a full temporary.

Rounding is to nearest, ties to even, in integer arithmetic; a NaN stays a NaN (bf16: quiet, its high payload
kept). On all other values it equals torch's and IEEE's.
"""

from __future__ import annotations

import numpy as np

from .dtypes import Dtype

CHUNK = 1 << 17
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
    if new.dtype == np.float32 and dtype is Dtype.FP32:
        new = new.view(np.uint32)
    cast = new.dtype == np.float32
    candidates = _Candidates(min(CHUNK, len(old)), dtype if cast else None)
    found = [candidates(old[at : at + CHUNK], new[at : at + CHUNK], at) for at in range(0, len(old), CHUNK)]
    where = np.concatenate(found) if found else np.empty(0, dtype=np.int64)
    bits = rounded(new[where], dtype) if cast else new[where]
    if cast and dtype is Dtype.BF16:
        differs = bits != old[where]
        if not differs.all():  # exact ties
            where, bits = where[differs], bits[differs]
    return where, bits


class _Candidates:
    """Positions in one chunk that may have changed: exact, but for what bf16 rounds back to its old bits."""

    def __init__(self, size: int, cast: Dtype | None) -> None:
        """`cast`: what float32 is to be rounded to; None: bit patterns are compared."""
        self._cast = cast
        self._wide = np.empty(size, dtype=np.uint32)
        self._mask = np.empty(size, dtype=bool)

    def __call__(self, old: np.ndarray, new: np.ndarray, at: int) -> np.ndarray:
        wide, mask = self._wide[: len(old)], self._mask[: len(old)]
        if self._cast is Dtype.BF16:
            # A master within half a step of its old bits need not be rounded. A NaN's bits may wrap around to look
            # near; the largest element is a NaN if any is.
            with np.errstate(invalid="ignore"):
                if np.isnan(new.max()):
                    return np.arange(at, at + len(old))
            np.copyto(wide, old)
            wide <<= np.uint32(16)
            np.subtract(new.view(np.uint32), wide, out=wide)
            wide += np.uint32(0x7FFF)
            np.greater_equal(wide, np.uint32(0xFFFF), out=mask)
        else:
            np.not_equal(old, new if self._cast is None else rounded(new, self._cast), out=mask)
        where = np.flatnonzero(mask)
        where += at
        return where
