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
    frames, raw = [], []
    for part in _parts(old, dtype, split):
        if part is None:
            frames += [b"", b""]
            continue
        within = symbols[part]
        where = np.flatnonzero(within >= 4)
        larger = size[part][where]
        too_large = larger > 255
        raw.append(new[part][where[too_large]])
        frames.append(deflate(_triples(within)))
        frames.append(deflate(np.where(too_large, 0, larger).astype(np.uint8).tobytes()))
    return [*frames, *to_planes(np.concatenate(raw))]


def from_steps(frames: Sequence[Buffer], old: np.ndarray, dtype: Dtype, split: int) -> np.ndarray:
    """New bits [n] from old ones [n] and the frames of `to_steps`. Raises WeightUpdateError."""
    symbols = np.empty(len(old), dtype=np.uint8)
    sized: list[tuple[np.ndarray, np.ndarray]] = []
    for part, triples, sizes in zip(_parts(old, dtype, split), frames[:4:2], frames[1:4:2], strict=True):
        if part is None:
            inflate(triples, exactly=0)
            inflate(sizes, exactly=0)
            continue
        count = len(old) if isinstance(part, slice) else len(part)
        within = _from_triples(inflate(triples, exactly=-(-count // 3)))[:count]
        symbols[part] = within
        where = np.flatnonzero(within >= 4)
        if not isinstance(part, slice):
            where = part[where]
        sized.append((where, np.frombuffer(inflate(sizes, exactly=len(where)), dtype=np.uint8)))
    steps = _STEPS[symbols]
    for where, size in sized:
        steps[where] *= size
    bits = old + steps.astype(np.dtype(f"i{old.itemsize}"), copy=False).view(old.dtype)
    raw_at = np.concatenate([where[size == 0] for where, size in sized])
    bits[raw_at] = from_planes(frames[4:], len(raw_at), old.dtype)
    return bits


def _parts(old: np.ndarray, dtype: Dtype, split: int) -> tuple[np.ndarray | slice | None, np.ndarray | slice]:
    """What selects the elements below `split`, None where there is no split, and those above it."""
    if not split:
        return None, slice(None)
    low = _exponents(old, dtype) < split
    # Lists of positions: selecting by a mask that has no pattern is several times slower.
    return np.flatnonzero(low), np.flatnonzero(~low)


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
