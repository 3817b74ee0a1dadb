"""Sorted positions in a range as bytes, and back.

gaps    unchanged elements before each changed one, as u8; 255 means "255 more, go on"
bitmap  one bit for each element of the range
"""

from __future__ import annotations

import numpy as np

from .errors import WeightUpdateError
from .frames import Buffer, inflate

_MORE = 255


def to_gaps(indices: np.ndarray) -> bytes:
    """`indices`: [n] sorted, n > 0."""
    gaps = np.empty(len(indices), dtype=np.uint32)
    gaps[0] = indices[0]
    np.subtract(indices[1:], indices[:-1], out=gaps[1:], casting="unsafe")
    gaps[1:] -= np.uint32(1)
    large = np.flatnonzero(gaps >= _MORE)
    if not len(large):
        return gaps.astype(np.uint8).tobytes()
    more = gaps[large] // np.uint32(_MORE)
    gaps[large] -= more * np.uint32(_MORE)
    return np.insert(gaps.astype(np.uint8), np.repeat(large, more), np.uint8(_MORE)).tobytes()


def from_gaps(frame: Buffer, count: int, size: int) -> np.ndarray:
    """[count] int64 positions below `size`. Raises WeightUpdateError."""
    gaps = np.frombuffer(inflate(frame, at_most=count + size // _MORE), dtype=np.uint8)
    ends = np.flatnonzero(gaps != _MORE)
    if len(ends) != count or len(gaps) != ends[-1] + 1:
        raise WeightUpdateError("gaps", f"{len(ends)} positions, {count} announced")
    indices = np.cumsum(gaps, dtype=np.int64)
    if len(ends) != len(gaps):
        indices = indices[ends]
    indices += np.arange(count)
    if indices[-1] >= size:
        raise WeightUpdateError("index_out_of_range", f"position {indices[-1]} of {size}")
    return indices


def to_bitmap(indices: np.ndarray, size: int) -> bytes:
    """`indices`: [n] sorted, below `size`."""
    mask = np.zeros(size, dtype=bool)
    mask[indices] = True
    return np.packbits(mask, bitorder="little").tobytes()


def from_bitmap(frame: Buffer, count: int, size: int) -> np.ndarray:
    """[count] int64 positions below `size`. Raises WeightUpdateError."""
    bits = np.frombuffer(inflate(frame, exactly=-(-size // 8)), dtype=np.uint8)
    indices = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(bool))
    if len(indices) != count:
        raise WeightUpdateError("bitmap", f"{len(indices)} positions, {count} announced")
    if indices[-1] >= size:
        raise WeightUpdateError("index_out_of_range", f"position {indices[-1]} of {size}")
    return indices
