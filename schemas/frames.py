"""Byte buffers as zstd frames whose content size is stated, and checked before anything is decompressed.

What comes here has no repetitions that are worth a match, only an uneven distribution of bytes. So the match finder is
the fastest there is, with a table that it can hardly find anything by: measured on gaps and steps that is 1 to 10 %
smaller than level 1, which takes chance repetitions for matches, and up to three times as fast.
"""

from __future__ import annotations

import zstandard

from .errors import WeightUpdateError

Buffer = bytes | memoryview

_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=True
)


def deflate(data: Buffer) -> bytes:
    """One frame; no bytes for no data."""
    if not len(data):
        return b""
    # A compressor of its own: they must not be shared between threads.
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data)


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
