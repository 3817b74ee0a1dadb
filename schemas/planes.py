"""Bit patterns as byte planes, high bytes first, each a frame of its own: as they are, or as zigzag differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .errors import WeightUpdateError
from .frames import Buffer, deflate, inflate


def to_planes(bits: np.ndarray) -> list[bytes]:
    """uint16 or uint32 [n] -> a frame for each of their bytes."""
    parts = bits.view(np.uint8).reshape(-1, bits.itemsize)
    return [deflate(parts[:, k].tobytes()) for k in reversed(range(bits.itemsize))]


def from_planes(frames: Sequence[Buffer], count: int, dtype: np.dtype) -> np.ndarray:
    """The inverse: [count] of `dtype`. Raises WeightUpdateError."""
    if len(frames) != dtype.itemsize:
        raise WeightUpdateError("frames", f"{len(frames)} byte planes, expected {dtype.itemsize}")
    bits = np.empty(count, dtype=dtype)
    parts = bits.view(np.uint8).reshape(-1, dtype.itemsize)
    for k, frame in zip(reversed(range(dtype.itemsize)), frames, strict=True):
        parts[:, k] = np.frombuffer(inflate(frame, exactly=count), dtype=np.uint8)
    return bits


def to_differences(old: np.ndarray, new: np.ndarray) -> list[bytes]:
    """Planes of new - old, signs folded into the lowest bit, so that the high bytes of small steps are 0."""
    step = (new - old).view(np.dtype(f"i{new.itemsize}"))
    return to_planes(((step << 1) ^ (step >> (8 * new.itemsize - 1))).view(new.dtype))


def from_differences(frames: Sequence[Buffer], old: np.ndarray) -> np.ndarray:
    """New bits [n] from old ones. Raises WeightUpdateError."""
    folded = from_planes(frames, len(old), old.dtype)
    one = old.dtype.type(1)
    return old + ((folded >> one) ^ (np.zeros_like(folded) - (folded & one)))
