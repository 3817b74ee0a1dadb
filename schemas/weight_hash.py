"""Rolling hashes of weights: equal bits give equal hashes, and a sparse change costs only what it changed.

tensor: H = sum over i of mix64(salt ^ (i << width | bits_i)) mod 2**64, mix64 being splitmix64's finaliser
(Steele, Lea and Flood 2014), width 16 or 32, the salt the number format's (bf16: 0). Being a sum, the hashes of
a tensor's shards add up to its own. Set: the sum over tensors of xxh3_64(name, shape, H) mod 2**64. Neither is
cryptographic: blobs carry a SHA-256 besides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

import numpy as np
import xxhash

from .dtypes import Dtype, Dtypes, dtype_of

MASK = 2**64 - 1
_CHUNK = 1 << 15
"""Elements mixed at once: the temporaries stay in the cache."""
_GOLDEN = 0x9E3779B97F4A7C15
_SALTS = {Dtype.BF16: 0, Dtype.FP16: 1 << 56, Dtype.FP32: 2 << 56}


def tensor_hash(bits: np.ndarray, dtype: Dtype | None = None, start: int = 0) -> int:
    """Hash (uint64) of a whole tensor, or of the part of it that begins at flat position `start`.

    `bits`: uint16 or uint32 of any shape, read in C order; without `dtype` uint16 is bf16 and uint32 is fp32.
    """
    dtype = _dtype(bits) if dtype is None else dtype
    flat = bits.reshape(-1)
    total = 0
    for at in range(0, len(flat), _CHUNK):
        chunk = flat[at : at + _CHUNK]
        positions = np.arange(start + at, start + at + len(chunk), dtype=np.uint64)
        total += _mixed_sum(_keys(positions, dtype), chunk)
    return total & MASK


def update_hash(
    h: int, indices: np.ndarray, old: np.ndarray, new: np.ndarray, dtype: Dtype | None = None, start: int = 0
) -> int:
    """`h` after the elements at flat positions `start + indices` [n] went from `old` to `new` (bits [n])."""
    dtype = _dtype(new) if dtype is None else dtype
    for at in range(0, len(indices), _CHUNK):
        part = slice(at, at + _CHUNK)
        keys = _keys(indices[part].astype(np.uint64) + np.uint64(start), dtype)
        h += _mixed_sum(keys, new[part]) - _mixed_sum(keys, old[part])
    return h & MASK


def entry_hash(name: str, shape: tuple[int, ...], h: int) -> int:
    """What one tensor adds to the hash of a set."""
    encoded = name.encode()
    head = struct.pack(f"<II{len(shape)}q", len(encoded), len(shape), *shape)
    return xxhash.xxh3_64_intdigest(head + encoded + struct.pack("<Q", h))


def tensor_hashes(weights: Mapping[str, np.ndarray], dtypes: Dtypes | None = None) -> dict[str, int]:
    """Name -> tensor hash."""
    return {name: tensor_hash(bits, dtype_of(name, bits, dtypes)) for name, bits in weights.items()}


def set_hash(
    weights: Mapping[str, np.ndarray],
    hashes: Mapping[str, int] | None = None,
    dtypes: Dtypes | None = None,
) -> int:
    """Hash (uint64) of all of `weights`; `hashes`: their tensor hashes where they are known."""
    known = tensor_hashes(weights, dtypes) if hashes is None else hashes
    return shapes_hash({name: bits.shape for name, bits in weights.items()}, known)


def shapes_hash(shapes: Mapping[str, tuple[int, ...]], hashes: Mapping[str, int]) -> int:
    """Hash (uint64) of a set whose tensors have these shapes and these tensor hashes."""
    return sum(entry_hash(name, tuple(shape), hashes[name]) for name, shape in shapes.items()) & MASK


def sum_hashes(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Name -> hash of the whole tensor, from the hashes of its shards, each held by one of `parts`."""
    total: dict[str, int] = {}
    for part in parts:
        for name, h in part.items():
            total[name] = (total.get(name, 0) + h) & MASK
    return total


def replace_entry(total: int, name: str, shape: tuple[int, ...], old: int, new: int) -> int:
    """The hash of a set after the tensor hash of one member went from `old` to `new`."""
    return (total - entry_hash(name, shape, old) + entry_hash(name, shape, new)) & MASK


def _dtype(bits: np.ndarray) -> Dtype:
    return dtype_of("the tensor", bits)


def _keys(positions: np.ndarray, dtype: Dtype) -> np.ndarray:
    """salt ^ (position << width), in place; the low `width` bits are free for the element's."""
    positions <<= np.uint64(8 * dtype.bits.itemsize)
    if _SALTS[dtype]:
        positions ^= np.uint64(_SALTS[dtype])
    return positions


def _mixed_sum(keys: np.ndarray, bits: np.ndarray) -> int:
    x = keys | bits
    x += np.uint64(_GOLDEN)
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(x, np.uint64(27), out=shifted)
    x ^= shifted
    x *= np.uint64(0x94D049BB133111EB)
    np.right_shift(x, np.uint64(31), out=shifted)
    x ^= shifted
    return int(x.sum(dtype=np.uint64))
