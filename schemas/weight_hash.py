"""Rolling hashes of weights: equal bits give equal hashes, and a sparse change costs only what it changed.

tensor: H = sum over i of mix64(i << 16 | bits_i) mod 2**64, mix64 being splitmix64's finaliser (Steele, Lea
and Flood 2014); set: the sum over tensors of xxh3_64(name, shape, H) mod 2**64. Neither is cryptographic:
blobs carry a SHA-256 besides.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import xxhash

MASK = 2**64 - 1
_CHUNK = 1 << 14
"""Elements mixed at once: the temporaries stay in the cache."""


def tensor_hash(bits: np.ndarray) -> int:
    """Hash (uint64) of a whole tensor; `bits`: uint16 of any shape, read in C order."""
    flat = bits.reshape(-1)
    total = 0
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        positions = np.arange(start, start + len(chunk), dtype=np.uint64)
        total += _mixed_sum(positions, chunk)
    return total & MASK


def update_hash(h: int, indices: np.ndarray, old: np.ndarray, new: np.ndarray) -> int:
    """`h` after the elements at flat positions `indices` [n] went from `old` to `new` (uint16 [n])."""
    positions = indices.astype(np.uint64, copy=False)
    return (h + _mixed_sum(positions, new) - _mixed_sum(positions, old)) & MASK


def entry_hash(name: str, shape: tuple[int, ...], h: int) -> int:
    """What one tensor adds to the hash of a set."""
    encoded = name.encode()
    head = struct.pack(f"<II{len(shape)}q", len(encoded), len(shape), *shape)
    return xxhash.xxh3_64_intdigest(head + encoded + struct.pack("<Q", h))


def tensor_hashes(weights: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Name -> tensor hash."""
    return {name: tensor_hash(bits) for name, bits in weights.items()}


def set_hash(weights: Mapping[str, np.ndarray], hashes: Mapping[str, int] | None = None) -> int:
    """Hash (uint64) of all of `weights`; `hashes`: their tensor hashes where they are known."""
    parts = (
        entry_hash(name, bits.shape, tensor_hash(bits) if hashes is None else hashes[name])
        for name, bits in weights.items()
    )
    return sum(parts) & MASK


def replace_entry(total: int, name: str, shape: tuple[int, ...], old: int, new: int) -> int:
    """The hash of a set after the tensor hash of one member went from `old` to `new`."""
    return (total - entry_hash(name, shape, old) + entry_hash(name, shape, new)) & MASK


def _mixed_sum(positions: np.ndarray, bits: np.ndarray) -> int:
    x = positions << np.uint64(16)
    x |= bits
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return int(x.sum(dtype=np.uint64))
