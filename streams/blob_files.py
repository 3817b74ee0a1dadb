"""Local files for the blob store: written and hashed in pieces, mapped, and gone when something fails."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

Buffer = bytes | bytearray | memoryview
PIECE_BYTES = 8 * 2**20


def hashed(pieces: Iterable[Buffer], write: Callable[[Buffer], object] | None = None) -> tuple[int, str]:
    """(bytes, SHA-256) of `pieces`, each of which is given to `write` too."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += piece.nbytes if isinstance(piece, memoryview) else len(piece)
        if write is not None:
            write(piece)
    return size, digest.hexdigest()


def pieces_of(path: Path) -> Iterator[bytes]:
    """A file's bytes, at most PIECE_BYTES at a time."""
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def settle(file: IO[bytes]) -> None:
    """After a power failure a name must not stand for bytes that never reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def map_file(path: Path) -> memoryview:
    """A whole file, read-only; the mapping lives as long as it is referred to, the name need not."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@contextlib.contextmanager
def gone_after(part: str) -> Iterator[None]:
    """Removes `part` at the end, where it still has that name."""
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
