"""Large payloads by reference: a record above the inline limit goes to the blob store, the record names it.

The value then is one JSON object {"blob", "size", "sha256"} under the header `claim: 1`; all other headers stay.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..schemas.codec import Headers, header
from ..schemas.errors import BlobCorruptError, BlobNameError, BlobNotFoundError, InvalidMessageError
from .blobs import BlobRef, BlobStore

CLAIM_HEADER = "claim"
MAX_CLAIM_BYTES = 256 * 1024 * 1024


def check_in(
    value: bytes, headers: Headers, *, name: str, store: BlobStore, inline_max: int
) -> tuple[bytes, Headers]:
    """`value` and `headers` as they stand, or a claim on a blob called `name` when `value` is too large."""
    if len(value) <= inline_max:
        return value, headers
    ref = store.put(name, value)
    claim = json.dumps({"blob": ref.name, "size": ref.size, "sha256": ref.sha256}).encode()
    return claim, [*headers, (CLAIM_HEADER, b"1")]


def check_out(value: bytes | None, headers: Sequence[tuple[str, bytes]], *, store: BlobStore) -> bytes | None:
    """The record's own bytes, fetched where they are claimed. InvalidMessageError for a claim that cannot be honoured."""
    if header(headers, CLAIM_HEADER) is None:
        return value
    try:
        claim = json.loads(value or b"")
    except (ValueError, RecursionError) as e:
        raise InvalidMessageError("claim", f"not a claim: {e}") from None
    ref = _ref(claim)
    if ref.size > MAX_CLAIM_BYTES:
        raise InvalidMessageError("too_large", f"the claimed blob has {ref.size} bytes")
    try:
        return store.get(ref)
    except (BlobNotFoundError, BlobCorruptError, BlobNameError) as e:
        raise InvalidMessageError("claim", str(e)) from None


def _ref(claim: Any) -> BlobRef:
    fields = [claim.get(name) for name in ("blob", "size", "sha256")] if isinstance(claim, dict) else []
    match fields:
        case [str(name), int(size), str(sha256)]:
            return BlobRef(name, size, sha256)
    raise InvalidMessageError("claim", 'not a claim: {"blob", "size", "sha256"} is expected')
