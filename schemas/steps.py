"""Small changes of bit patterns as bytes: one byte for three elements, and it needs the exact old bits to be read.

step     new bits - old bits, modulo 2**16 (2**32), as a signed integer that is not 0
triples  sign and size (1, 2, more) of three steps as one number below 216: nine in ten steps are +1 or -1, so a byte
         for each would cost a whole bit where the Huffman code can do with half of one
more     the size of the larger steps as u8; 0: not even that is enough, take the next raw value
split    a small weight takes larger steps than a large one, so elements whose exponent is below `split` are written
         apart from the others, each with its own statistics; the reader knows the exponents from the old bits
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .dtypes import Dtype
from .errors import WeightUpdateError
from .frames import Buffer, deflate, inflate
from .planes import from_planes, to_planes

_EXPONENT = {Dtype.BF16: (7, 0xFF), Dtype.FP16: (10, 0x1F), Dtype.FP32: (23, 0xFF)}
"""(shift, mask) of the exponent in the bit pattern."""
_SYMBOLS = 6
_BYTES = _SYMBOLS**3
_FEW = 512
"""Fewer elements than this are not worth two distributions."""
_MORE_BITS = 5.0
"""What the size of a larger step costs, about."""


def to_steps(old: np.ndarray, new: np.ndarray, dtype: Dtype, split: int) -> list[bytes]:
    """Frames of triples and sizes below `split`, of triples and sizes above it, and of raw values."""
    size, symbols = _symbols(old, new)
    low = _exponents(old, dtype) < split if split else np.zeros(len(old), dtype=bool)
    frames, raw = [], []
    for part in (np.flatnonzero(low), np.flatnonzero(~low)) if split else (None, slice(None)):
        if part is None:
            frames += [b"", b""]
            continue
        parts, sizes = symbols[part], size[part]
        where = np.flatnonzero(parts >= 4)
        larger = sizes[where]
        too_large = larger > 255
        raw.append(new[part][where[too_large]])
        frames.append(deflate(_triples(parts)))
        frames.append(deflate(np.where(too_large, 0, larger).astype(np.uint8).tobytes()))
    return [*frames, *to_planes(np.concatenate(raw))]


def from_steps(frames: Sequence[Buffer], old: np.ndarray, dtype: Dtype, split: int) -> np.ndarray:
    """New bits [n] from old ones [n] and the frames of `to_steps`. Raises WeightUpdateError."""
    low = _exponents(old, dtype) < split
    bits, raw_at = old.copy(), []
    for part, triples, sizes in (
        (np.flatnonzero(low), *frames[:2]),
        (np.flatnonzero(~low) if split else np.arange(len(old)), *frames[2:4]),
    ):
        symbols = _from_triples(inflate(triples, exactly=-(-len(part) // 3)))[: len(part)]
        steps = _STEPS[symbols]
        larger = np.flatnonzero(symbols >= 4)
        size = np.frombuffer(inflate(sizes, exactly=len(larger)), dtype=np.uint8)
        steps[larger] *= size
        bits[part] += steps.astype(np.dtype(f"i{old.itemsize}"), copy=False).view(old.dtype)
        raw_at.append(part[larger[size == 0]])
    where = np.concatenate(raw_at)
    bits[where] = from_planes(frames[4:], len(where), old.dtype)
    return bits


def best_split(old: np.ndarray, new: np.ndarray, dtype: Dtype) -> int:
    """The exponent at which two distributions differ most; 0 where one will do."""
    if len(old) < _FEW:
        return 0
    _, symbols = _symbols(old, new)
    exponents = _exponents(old, dtype)
    width = _EXPONENT[dtype][1] + 1
    counts = np.bincount(exponents.astype(np.int64) * _SYMBOLS + symbols, minlength=width * _SYMBOLS)
    below = np.cumsum(counts.reshape(width, _SYMBOLS), axis=0)
    cost = _bits(below) + _bits(below[-1] - below)
    best = int(np.argmin(cost))
    return best + 1 if cost[best] < 0.98 * cost[-1] and best + 1 < width else 0


_STEPS = np.array([1, -1, 2, -2, 1, -1], dtype=np.int16)
"""Symbol -> step, or the sign of a larger one."""
_TABLE = np.stack([np.arange(256) // _SYMBOLS**k % _SYMBOLS for k in range(3)], axis=1).astype(np.uint8)
"""Byte -> its three symbols."""


def _symbols(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(size of each step, its symbol: 2 x (size - 1 up to 2) + (1 if it goes down))."""
    step = (new - old).view(np.dtype(f"i{new.itemsize}"))
    size = np.abs(step).view(new.dtype)
    symbols = np.minimum(size, 3).astype(np.uint8)
    symbols -= np.uint8(1)
    symbols <<= np.uint8(1)
    symbols |= step < 0
    return size, symbols


def _exponents(bits: np.ndarray, dtype: Dtype) -> np.ndarray:
    shift, mask = _EXPONENT[dtype]
    return (bits >> bits.dtype.type(shift)) & bits.dtype.type(mask)


def _triples(symbols: np.ndarray) -> bytes:
    padded = np.zeros(-(-len(symbols) // 3) * 3, dtype=np.uint8)
    padded[: len(symbols)] = symbols
    a, b, c = padded.reshape(-1, 3).T
    return (c * np.uint8(_SYMBOLS * _SYMBOLS) + b * np.uint8(_SYMBOLS) + a).tobytes()


def _from_triples(data: bytes) -> np.ndarray:
    coded = np.frombuffer(data, dtype=np.uint8)
    if len(coded) and coded.max() >= _BYTES:
        raise WeightUpdateError("steps", f"{coded.max()} is no triple")
    return _TABLE[coded].reshape(-1)


def _bits(counts: np.ndarray) -> np.ndarray:
    """[m, symbols] counts -> [m] bits that an ideal code takes."""
    total = counts.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(counts > 0, counts * np.log2(total[:, None] / counts), 0.0)
    return each.sum(axis=1) + _MORE_BITS * counts[:, 4:].sum(axis=1)
