"""Which file system a store's URI means, and how a whole file gets into it in one piece.

Only calls that take a path literally are used: fsspec's put, get, rm, cat and cp read `[1]` as a pattern.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from ..schemas.errors import BlobError
from .blob_errors import Redaction

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "memory"}
_S3 = {"s3", "s3a"}
S3_ATTEMPTS = 3
"""Of one request, by botocore, with growing pauses of at most a few seconds; s3fs doubles them for throttling."""
S3_CHUNK_BYTES = 16 * 2**20
"""Of a multipart upload; 10,000 of them are the most, so 160 GiB."""
S3_CONCURRENCY = 4
"""Chunks held and sent at once."""
PIP_EXTRAS = {
    "s3": "headrace[s3]",
    "s3a": "headrace[s3]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}


class Placing(Enum):
    """How a file comes to be under its name all at once."""

    RENAME = "rename"
    """A local folder: written under a temporary name, then renamed."""
    OBJECT = "object"
    """An object store: one request, or a multipart upload, replaces the object."""
    MOVE = "move"
    """A remote file system whose `mv` is a rename."""


def open_fs(uri: str) -> tuple[Any, str, Placing]:
    """(file system, root path, how files are placed). Raises BlobError."""
    scheme = uri.split("://", 1)[0] if "://" in uri else ""
    try:
        fs, root = url_to_fs(uri, **_options(scheme))
    except (ImportError, ValueError) as e:
        package = PIP_EXTRAS.get(scheme)
        hint = f". Install it: pip install '{package}'" if package and isinstance(e, ImportError) else ""
        raise BlobError(f"store.uri {Redaction()(uri)!r} cannot be opened: {e}{hint}") from None
    if scheme in _S3:
        fs.retries = 2
    return fs, root, _placing(fs, uri)


def transfer_options(fs: Any) -> dict[str, int]:
    """What keeps the memory of an upload or a download small."""
    if _S3.isdisjoint(protocols(fs)):
        return {}
    return {"chunksize": S3_CHUNK_BYTES, "max_concurrency": S3_CONCURRENCY}


def protocols(fs: Any) -> set[str]:
    """The schemes that a file system answers to."""
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _options(scheme: str) -> dict[str, Any]:
    if scheme not in _S3:
        return {"auto_mkdir": True} if scheme == "" else {}
    configured = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    retries = {"retries": {"mode": "standard", "total_max_attempts": S3_ATTEMPTS}}
    # Other processes write: a cached listing would hide their blobs. Each store has its own client.
    return {
        "config_kwargs": retries | configured,
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }


def _placing(fs: Any, uri: str) -> Placing:
    known = protocols(fs)
    if "file" in known:
        return Placing.RENAME
    if known & _OBJECT_STORES:
        return Placing.OBJECT
    if type(fs).mv is fsspec.AbstractFileSystem.mv:
        raise BlobError(
            f"store.uri {Redaction()(uri)!r}: a file cannot be put there in one piece; use a local folder, s3://, "
            "gs:// or abfs://"
        )
    return Placing.MOVE
