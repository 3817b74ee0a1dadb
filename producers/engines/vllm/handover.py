"""An update as one file that the workers of an engine map into memory: what crosses is its path, not its bytes.

8 bytes little-endian header size | header as JSON | arrays, each at a multiple of 64 bytes. The file lives as long
as one update and never leaves the machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ....schemas.dtypes import Dtype
from ....schemas.errors import WeightUpdateError
from ....schemas.update import TensorPatch, WeightUpdate

FORMAT = "headrace-handover/1"
_ALIGN = 64


def write_update(path: Path, update: WeightUpdate) -> str:
    """Write `update` to a new file; the digest (xxh3_128, hex) that `read_update` wants. Raises OSError."""
    arrays: list[np.ndarray] = []
    at = 0

    def place(array: np.ndarray) -> int:
        nonlocal at
        arrays.append(array)
        start = at
        at += array.nbytes + -array.nbytes % _ALIGN
        return start

    tensors = []
    for patch in update.patches:
        item: dict[str, Any] = {"name": patch.name, "shape": patch.shape, "dtype": patch.dtype.value}
        bits = np.ascontiguousarray(patch.bits, dtype=patch.dtype.bits).reshape(-1)
        item["count"], item["bits"] = len(bits), place(bits)
        if patch.indices is not None:
            item["indices"] = place(np.ascontiguousarray(patch.indices, dtype=np.int64))
        tensors.append(item)
    header = {
        "format": FORMAT,
        "version": update.version,
        "base_version": update.base_version,
        "weights_hash": update.weights_hash,
        "size": at,
        "tensors": tensors,
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-(len(head) + 8) % _ALIGN)
    digest = xxhash.xxh3_128()
    # Only this user may read it; the name is new, so that nobody's link is followed.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        for part in _parts(head, arrays):
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


def read_update(path: Path, digest: str) -> WeightUpdate:
    """The update in `path`, its arrays mapped, not copied. WeightUpdateError(`handover`) if it is not that file."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")  # private pages: torch wants writable arrays
        if xxhash.xxh3_128_hexdigest(memoryview(data.data)) != digest:
            raise WeightUpdateError("handover", f"{path} is not the file that was written")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        if header["format"] != FORMAT:
            raise WeightUpdateError("handover", f"{path}: {header['format']!r}, expected {FORMAT}")
        body = data[start:]
        return WeightUpdate(
            version=header["version"],
            base_version=header["base_version"],
            weights_hash=header["weights_hash"],
            patches=tuple(_patch(body, item) for item in header["tensors"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise WeightUpdateError("handover", f"{path}: {type(e).__name__}: {e}") from None


def _patch(body: np.ndarray, item: dict[str, Any]) -> TensorPatch:
    dtype = Dtype(item["dtype"])
    count, at = item["count"], item.get("indices")
    return TensorPatch(
        name=item["name"],
        shape=tuple(item["shape"]),
        dtype=dtype,
        bits=_array(body, item["bits"], count, dtype.bits),
        indices=None if at is None else _array(body, at, count, np.dtype(np.int64)),
    )


def _array(body: np.ndarray, at: int, count: int, dtype: np.dtype) -> np.ndarray:
    return body[at : at + count * dtype.itemsize].view(dtype)


def _parts(head: bytes, arrays: Iterable[np.ndarray]) -> Iterable[bytes | memoryview]:
    yield len(head).to_bytes(8, "little")
    yield head
    for array in arrays:
        yield array.data.cast("B") if array.nbytes else b""
        yield b"\0" * (-array.nbytes % _ALIGN)
