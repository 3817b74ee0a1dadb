"""The object store: any fsspec file system, whole blobs or none, checked on the way out.

Names are literal paths under the store's root: never a pattern, never outside it. What may be large goes in from
pieces or a file, under a name that holds its hash, and comes out as a mapping or a file: never twice in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import fsspec

from ..schemas.errors import (
    BlobCorruptError,
    BlobError,
    BlobNameError,
)
from .blob_calls import StoreCalls
from .blob_errors import Redaction
from .blob_files import Buffer, gone_after, hashed, map_file, pieces_of, settle
from .blob_fs import Placing, open_fs, transfer_options
from .blob_ref import BlobRef, check, content_ref

_SEGMENT = re.compile(r"[A-Za-z0-9_.=\[\]-]+")
MAX_BLOB_BYTES = 1 << 36
PART = ".part"
"""Ending of what is not whole yet."""


class BlobStore:
    """Whole blobs under one root. May be used by several threads."""

    def __init__(self, uri: str, *, sleep: Callable[[float], object] = time.sleep) -> None:
        """`uri`: any fsspec URI; a plain path is a local folder. Raises BlobError."""
        self._fs, self._root, self._placing = open_fs(uri)
        redact = Redaction(getattr(self._fs, "storage_options", None))
        self._where = redact(uri)
        self._calls = StoreCalls(self._where, redact, sleep)

    def put(self, name: str, data: bytes) -> BlobRef:
        """Write `data` under `name`, all or nothing; what was there is replaced. Raises BlobError."""
        path, part = self._paths(name)
        ref = BlobRef(name, len(data), hashlib.sha256(data).hexdigest())
        if self._placing is Placing.OBJECT:
            self._calls.write(name, lambda: self._fs.pipe_file(path, data))
        elif self._placing is Placing.RENAME:
            self._calls.write(name, lambda: self._put_local(path, part, data))
        else:
            self._calls.write(name, lambda: self._move_in(path, part, lambda: self._fs.pipe_file(part, data)))
        return ref

    def put_content(self, stem: str, data: bytes) -> BlobRef:
        """Write `data` under `stem`-<its SHA-256>; nothing is done where that is there already. Raises BlobError."""
        ref = content_ref(stem, len(data), hashlib.sha256(data).hexdigest())
        return ref if self.size(ref.name) == ref.size else self.put(ref.name, data)

    def put_stream(self, stem: str, pieces: Iterable[Buffer]) -> BlobRef:
        """`put_content` of what `pieces` make together, one of them in memory at a time. Raises BlobError.

        What `pieces` raises goes through, and leaves nothing behind.
        """
        with self._spool(stem) as (file, spooled):
            size, digest = hashed(pieces, lambda piece: self._calls.once(stem, lambda: file.write(piece)))
            self._calls.once(stem, lambda: settle(file))
            ref = content_ref(stem, size, digest)
            if self.size(ref.name) != size:
                self._place(ref.name, spooled)
        return ref

    def put_file(self, stem: str, source: Path) -> BlobRef:
        """`put_content` of a local file's bytes, which are never in memory whole. Raises BlobError, OSError."""
        if self._placing is Placing.RENAME:
            return self.put_stream(stem, pieces_of(source))
        size, digest = hashed(pieces_of(source))
        ref = content_ref(stem, size, digest)
        if self.size(ref.name) != size:
            self._place(ref.name, source)
        return ref

    def get(self, ref: BlobRef) -> bytes:
        """The blob's bytes, checked against the reference. Raises BlobError and its kinds."""
        path = self._expected(ref)
        data = self._calls.read(ref.name, lambda: self._fs.cat_file(path))
        check(ref, len(data), hashlib.sha256(data).hexdigest())
        return data

    def mapped(self, ref: BlobRef) -> memoryview:
        """The blob's bytes as a read-only mapping of a file, checked like `get`; lives as long as it is referred to.

        A remote blob is fetched into a file without a name in the folder for temporary files (TMPDIR).
        """
        if self._placing is Placing.RENAME:
            path = self._expected(ref)
            view = self._calls.read(ref.name, lambda: map_file(Path(path)))
        elif ref.size == 0 or isinstance(self._fs, fsspec.get_filesystem_class("memory")):
            return memoryview(self.get(ref))
        else:
            with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
                fetched = Path(folder) / "blob"
                self._fetch(ref, fetched)
                view = map_file(fetched)
        check(ref, len(view), hashlib.sha256(view).hexdigest())
        return view

    def get_file(self, ref: BlobRef, target: Path) -> None:
        """Write the blob, checked like `get`, to the local file `target`, all or nothing. Raises BlobError, OSError."""
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}{PART}")
        try:
            self._fetch(ref, part)
            size, digest = hashed(pieces_of(part))
            check(ref, size, digest)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def size(self, name: str) -> int | None:
        """Of a blob, in bytes; None where there is none. Raises BlobError."""
        path = self._path(name)
        try:
            info = self._calls.run(
                f"blob {name} in {self._where} cannot be looked at", lambda: self._fs.info(path)
            )
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def delete(self, name: str) -> None:
        """Remove a blob; one that is gone already is fine. Raises BlobError."""
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            self._calls.run(f"blob {name} in {self._where} cannot be deleted", lambda: self._fs.rm_file(path))

    def names(self, folder: str) -> list[str]:
        """Blob names directly under `folder`, sorted, unfinished ones left out. Raises BlobError."""
        return sorted(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """Name -> bytes of the blobs directly under `folder`, unfinished ones left out. Raises BlobError."""
        path = self._path(folder)
        try:
            found = self._calls.run(
                f"folder {folder} in {self._where} cannot be listed", lambda: self._fs.ls(path, detail=True)
            )
        except FileNotFoundError:
            return {}
        return {
            f"{folder}/{posixpath.basename(str(info['name']))}": int(info["size"])
            for info in found
            if info["type"] == "file" and not str(info["name"]).endswith(PART)
        }

    def unfinished(self, folder: str, *, before_s: float) -> dict[str, int]:
        """Name -> bytes of what writers that died before `before_s` (Unix seconds) left in a local store.

        An object store shows nothing of them; its own lifecycle rules end their multipart uploads.
        """
        path = Path(self._path(folder))
        if self._placing is not Placing.RENAME or not path.is_dir():
            return {}
        found = ((p.name, p.stat()) for p in path.iterdir() if p.name.endswith(PART))
        return {f"{folder}/{name}": stat.st_size for name, stat in found if stat.st_mtime < before_s}

    def _expected(self, ref: BlobRef) -> str:
        """The path of a blob that has the size it should have."""
        if not 0 <= ref.size <= MAX_BLOB_BYTES:
            raise BlobCorruptError(f"blob {ref.name}: size {ref.size} is out of range")
        path = self._path(ref.name)
        info = self._calls.read(ref.name, lambda: self._fs.info(path))
        if info["type"] != "file":
            raise BlobError(f"blob {ref.name} in {self._where} is no file but a {info['type']}")
        if info["size"] != ref.size:
            raise BlobCorruptError(f"blob {ref.name}: {info['size']} bytes, the record says {ref.size}")
        return path

    def _fetch(self, ref: BlobRef, target: Path) -> None:
        path, options = self._expected(ref), transfer_options(self._fs)
        self._calls.read(ref.name, lambda: self._fs.get_file(path, str(target), **options))

    def _put_local(self, path: str, part: str, data: bytes) -> None:
        os.makedirs(posixpath.dirname(path), exist_ok=True)
        with gone_after(part), open(part, "xb") as file:
            file.write(data)
            settle(file)
            os.replace(part, path)

    def _move_in(self, path: str, part: str, fill: Callable[[], object]) -> None:
        self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
        try:
            fill()
            self._fs.mv(part, path)
        except Exception:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                self._fs.rm_file(part)
            raise

    @contextlib.contextmanager
    def _spool(self, stem: str) -> Iterator[tuple[IO[bytes], Path]]:
        """A new local file, gone afterwards: beside its place in a local store, so that it needs only a new name."""
        if self._placing is Placing.RENAME:
            path, part = self._paths(stem)
            self._calls.once(stem, lambda: os.makedirs(posixpath.dirname(path), exist_ok=True))
            with gone_after(part), self._calls.once(stem, lambda: open(part, "xb")) as file:
                yield file, Path(part)
            return
        with self._calls.once(stem, lambda: tempfile.NamedTemporaryFile(prefix="headrace-")) as file:
            yield file, Path(file.name)

    def _place(self, name: str, source: Path) -> None:
        """A whole local file comes to be the blob `name`; in a local store it is the spooled one."""
        path, part = self._paths(name)
        if self._placing is Placing.RENAME:
            self._calls.write(name, lambda: os.replace(source, path))
            return
        options = transfer_options(self._fs)
        if self._placing is Placing.OBJECT:
            self._calls.write(name, lambda: self._fs.put_file(str(source), path, **options))
        else:
            self._calls.write(
                name, lambda: self._move_in(path, part, lambda: self._fs.put_file(str(source), part))
            )

    def _paths(self, name: str) -> tuple[str, str]:
        """(path, a temporary one beside it)."""
        path = self._path(name)
        return path, f"{path}.{uuid.uuid4().hex[:8]}{PART}"

    def _path(self, name: str) -> str:
        parts = name.split("/")
        if not all(_SEGMENT.fullmatch(p) and p not in (".", "..") for p in parts):
            raise BlobNameError(f"blob name {name!r} is not a plain path")
        return posixpath.join(self._root, *parts)


def memory_store() -> BlobStore:
    """A store in this process's memory, for tests."""
    return BlobStore(f"memory://{uuid.uuid4().hex}")
