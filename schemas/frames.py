"""Byte buffers as zstd frames whose content size is stated, and checked before anything is decompressed."""

from __future__ import annotations

import zstandard

from .errors import WeightUpdateError

Buffer = bytes | memoryview


def deflate(data: Buffer) -> bytes:
    """One frame; no bytes for no data."""
    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data) if len(data) else b""


def inflate(data: Buffer, *, exactly: int | None = None, at_most: int | None = None) -> bytes:
    """The content of one frame, whose size is known or bounded. Raises WeightUpdateError."""
    limit = exactly if exactly is not None else at_most
    assert limit is not None
    try:
        size = zstandard.get_frame_parameters(data).content_size if len(data) else 0
        if size > limit or (exactly is not None and size != exactly):
            raise WeightUpdateError("content_size", f"a frame of {size} bytes where {limit} fit")
        if not len(data):
            return b""
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as e:
        raise WeightUpdateError("zstd", str(e)) from None
