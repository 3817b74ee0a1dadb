"""A reference to a blob, and whether bytes are what it stands for."""

from __future__ import annotations

from dataclasses import dataclass

from ..schemas.errors import BlobCorruptError


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob's name under the store's root, its size and its content's hash."""

    name: str
    size: int
    sha256: str


def content_ref(stem: str, size: int, digest: str) -> BlobRef:
    """Of a blob whose name holds its hash."""
    return BlobRef(f"{stem}-{digest}", size, digest)


def check(ref: BlobRef, size: int, digest: str) -> None:
    """BlobCorruptError unless these are the blob's size and SHA-256."""
    if size != ref.size:
        raise BlobCorruptError(f"blob {ref.name}: {size} bytes came, the record says {ref.size}")
    if digest != ref.sha256:
        raise BlobCorruptError(f"blob {ref.name}: its hash differs from the record's")
