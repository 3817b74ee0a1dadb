"""One tensor's change as bytes: positions as u8 gaps, values as int8 steps or raw bits, or the whole tensor.

gap8    unchanged elements before each changed one; 255 means "255 more, go on"
ulp8    new bits - old bits as int8, modulo 2**16; -128 means "take the next raw value". Needs the exact base
raw     new bits at the positions: all high bytes, then all low bytes
planes  new bits of the whole tensor: all high bytes, then all low bytes

All are integer arithmetic on bit patterns, so -0.0, NaN payloads and denormals survive. Every buffer is one
zstd frame whose content size is checked against what the tensor allows before anything is decompressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import zstandard

from .errors import WeightUpdateError

_CHUNK = 1 << 20
_ESCAPE = -128
_MORE = 255


class Codec(StrEnum):
    """How the values of one tensor are written."""

    ULP8 = "ulp8"
    RAW = "raw"
    PLANES = "planes"


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor's change; empty bytes where the codec has no such buffer."""

    codec: Codec
    nnz: int
    """Changed elements."""
    gap: bytes
    val: bytes
    esc: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.gap) + len(self.val) + len(self.esc)


def changed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Flat positions (int64, sorted) at which two uint16 vectors of one length differ."""
    found = [
        np.flatnonzero(old[at : at + _CHUNK] != new[at : at + _CHUNK]) + at
        for at in range(0, len(old), _CHUNK)
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def pack(indices: np.ndarray, old: np.ndarray, new: np.ndarray) -> Packed:
    """The smallest form of `new` (flat uint16) given `old`; they differ exactly at `indices` [n > 0]."""
    compress = zstandard.ZstdCompressor(level=1, write_content_size=True).compress
    nnz = len(indices)
    values = new[indices]
    steps, escaped = _steps(old[indices], values)
    gap = compress(_gaps(indices))
    esc = compress(_planes(escaped)) if len(escaped) else b""
    options = [Packed(Codec.ULP8, nnz, gap, compress(steps.tobytes()), esc)]
    # Steps win by far while most changes are small, so the others are tried only when many are not.
    if len(escaped) * 8 > nnz:
        options.append(Packed(Codec.RAW, nnz, gap, compress(_planes(values)), b""))
        if nnz * 2 > len(new):
            options.append(Packed(Codec.PLANES, nnz, b"", compress(_planes(new)), b""))
    return min(options, key=lambda p: p.size)


def unpack(packed: Packed, base: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """(indices, new bits) on top of `base` (flat uint16); indices None: the bits are the whole tensor.

    Raises WeightUpdateError for whatever does not fit the tensor; `base` is only read.
    """
    size = len(base)
    if not 0 < packed.nnz <= size:
        raise WeightUpdateError("nnz", f"{packed.nnz} changed elements of {size}")
    if packed.codec is Codec.PLANES:
        return None, _from_planes(_inflate(packed.val, exactly=2 * size))
    indices = _positions(_inflate(packed.gap, at_most=packed.nnz + size // _MORE), packed.nnz, size)
    if packed.codec is Codec.RAW:
        return indices, _from_planes(_inflate(packed.val, exactly=2 * packed.nnz))
    steps = np.frombuffer(_inflate(packed.val, exactly=packed.nnz), dtype=np.int8)
    bits = base[indices] + steps.astype(np.int16).view(np.uint16)
    escapes = np.flatnonzero(steps == _ESCAPE)
    if len(escapes):
        bits[escapes] = _from_planes(_inflate(packed.esc, exactly=2 * len(escapes)))
    elif packed.esc:
        raise WeightUpdateError("escapes", "raw values that no step asks for")
    return indices, bits


def _gaps(indices: np.ndarray) -> bytes:
    gaps = np.diff(indices, prepend=-1) - 1
    more, last = np.divmod(gaps, _MORE)
    ends = np.cumsum(more + 1) - 1
    out = np.full(int(ends[-1]) + 1, _MORE, dtype=np.uint8)
    out[ends] = last
    return out.tobytes()


def _positions(data: bytes, nnz: int, size: int) -> np.ndarray:
    gaps = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(gaps != _MORE)
    if len(ends) != nnz or len(gaps) != ends[-1] + 1:
        raise WeightUpdateError("gaps", f"{len(ends)} positions, {nnz} announced")
    indices = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(nnz)
    if indices[-1] >= size:
        raise WeightUpdateError("index_out_of_range", f"position {indices[-1]} of {size}")
    return indices


def _steps(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    difference = (new - old).view(np.int16)
    large = np.abs(difference.astype(np.int32)) > 127
    steps = np.where(large, _ESCAPE, difference).astype(np.int8)
    return steps, new[large]


def _planes(bits: np.ndarray) -> bytes:
    return (bits >> 8).astype(np.uint8).tobytes() + bits.astype(np.uint8).tobytes()


def _from_planes(data: bytes) -> np.ndarray:
    planes = np.frombuffer(data, dtype=np.uint8).reshape(2, -1)
    return (planes[0].astype(np.uint16) << 8) | planes[1]


def _inflate(data: bytes, *, exactly: int | None = None, at_most: int | None = None) -> bytes:
    limit = exactly if exactly is not None else at_most
    assert limit is not None
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > limit or (exactly is not None and size != exactly):
            raise WeightUpdateError("content_size", f"a frame of {size} bytes where {limit} fit")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as e:
        raise WeightUpdateError("zstd", str(e)) from None
