"""The object store: any fsspec file system, whole blobs, written under a temporary name and then renamed.

Names are literal paths under the store's root: never a pattern, never outside it.
"""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
import re
import uuid
from dataclasses import dataclass

import fsspec
from fsspec.core import url_to_fs

from ..schemas.errors import BlobCorruptError, BlobError, BlobNameError, BlobNotFoundError

_SEGMENT = re.compile(r"[A-Za-z0-9_.=\[\]-]+")
MAX_BLOB_BYTES = 1 << 36


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob's name under the store's root, its size and its content's hash."""

    name: str
    size: int
    sha256: str


class BlobStore:
    """Whole blobs under one root."""

    def __init__(self, uri: str) -> None:
        """`uri`: any fsspec URI; a plain path is a local folder."""
        try:
            self._fs, self._root = url_to_fs(uri, auto_mkdir=True) if "://" not in uri else url_to_fs(uri)
        except (ImportError, ValueError) as e:
            raise BlobError(f"store.uri {_without_secret(uri)!r} cannot be opened: {e}") from None

    def put(self, name: str, data: bytes) -> BlobRef:
        """Write `data` under `name`, all or nothing. Raises BlobError."""
        path = self._path(name)
        ref = BlobRef(name, len(data), hashlib.sha256(data).hexdigest())
        part = f"{path}.{uuid.uuid4().hex[:8]}.part"
        try:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            if self._is_local():
                self._put_local(path, part, data)
            else:
                self._fs.pipe_file(path, data)  # object stores replace an object atomically
        except OSError as e:
            raise BlobError(f"blob {name} cannot be written: {e}") from e
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The blob's bytes, checked against the reference. Raises BlobError and its kinds."""
        if not 0 <= ref.size <= MAX_BLOB_BYTES:
            raise BlobCorruptError(f"blob {ref.name}: size {ref.size} is out of range")
        path = self._path(ref.name)
        try:
            if self._fs.size(path) != ref.size:
                raise BlobCorruptError(
                    f"blob {ref.name}: {self._fs.size(path)} bytes, the record says {ref.size}"
                )
            data = self._fs.cat_file(path)
        except FileNotFoundError:
            raise BlobNotFoundError(f"blob {ref.name} does not exist") from None
        except OSError as e:
            raise BlobError(f"blob {ref.name} cannot be read: {e}") from e
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise BlobCorruptError(f"blob {ref.name}: its hash differs from the record's")
        return data

    def delete(self, name: str) -> None:
        """Remove a blob; one that is gone already is fine."""
        try:
            self._fs.rm_file(self._path(name))
        except FileNotFoundError:
            return
        except OSError as e:
            raise BlobError(f"blob {name} cannot be deleted: {e}") from e

    def names(self, folder: str) -> list[str]:
        """Blob names directly under `folder`, sorted, unfinished ones left out."""
        path = self._path(folder)
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = (f"{folder}/{posixpath.basename(str(p))}" for p in found)
        return sorted(n for n in names if not n.endswith(".part"))

    def _put_local(self, path: str, part: str, data: bytes) -> None:
        try:
            with self._fs.open(part, "wb") as f:
                f.write(data)
            self._fs.mv(part, path)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._fs.rm_file(part)
            raise

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if not all(_SEGMENT.fullmatch(p) and p not in (".", "..") for p in parts):
            raise BlobNameError(f"blob name {name!r} is not a plain path")
        return posixpath.join(self._root, *parts)

    def _is_local(self) -> bool:
        return "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))


def _without_secret(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri)


def memory_store() -> BlobStore:
    """A store in this process's memory, for tests."""
    fsspec.filesystem("memory")
    return BlobStore(f"memory://{uuid.uuid4().hex}")
