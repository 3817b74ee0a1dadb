"""Anchors: all tensors of a version as a safetensors file, which any tool can open; or each rank's shards as one.

The header's metadata names the version, the rolling hash of the set and the SHA-256 of every tensor's bytes; of a
shard also where in its tensor it belongs. Nothing is copied on the way: decoded bits lie in the blob.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from .dtypes import Dtype, Dtypes, dtype_of
from .errors import WeightUpdateError
from .update import TensorPatch, Weights, WeightUpdate, check_same_tensors, expect
from .weight_hash import set_hash, shapes_hash, tensor_hash

ANCHOR_FORMAT = "headrace-anchor/2"
_HEADER_BYTES = 100_000_000
"""As safetensors itself limits it."""
_DTYPES = {dtype.safetensors: dtype for dtype in Dtype}

Place = tuple[tuple[int, ...], int]
"""(shape of the whole tensor, flat position in it at which a shard begins)"""


@dataclass(frozen=True, slots=True)
class _Piece:
    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    flat_offset: int
    bits: np.ndarray


def encode_anchor(
    weights: Weights, version: int, weights_hash: int | None = None, *, dtypes: Dtypes | None = None
) -> bytes:
    """All of `weights` as the bytes of a safetensors file; `weights_hash`: their set hash where it is known."""
    total = set_hash(weights, dtypes=dtypes) if weights_hash is None else weights_hash
    sink = io.BytesIO()
    write_anchor(sink, weights, version, total, dtypes=dtypes)
    return sink.getvalue()


def write_anchor(
    sink: BinaryIO,
    weights: Weights,
    version: int,
    weights_hash: int,
    *,
    dtypes: Dtypes | None = None,
    places: Mapping[str, Place] | None = None,
) -> int:
    """Write `weights` to `sink` as a safetensors file; returns its size. No copy of the weights is made.

    Each of `weights` is asked for twice, so that a mapping may make them on demand.
    `weights_hash`: set hash of the whole model. `places`: where each of `weights` is a shard, its place.
    """
    header: dict[str, Any] = {}
    digests, at = {}, 0
    for name in sorted(weights):
        bits = weights[name]
        dtype = dtype_of(name, bits, dtypes)
        data = _bytes(bits)
        digests[name] = hashlib.sha256(data).hexdigest()
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": list(bits.shape),
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    metadata = {"format": ANCHOR_FORMAT, "version": str(version), "weights_hash": str(weights_hash)}
    metadata["sha256"] = json.dumps(digests)
    if places is not None:
        metadata["places"] = json.dumps({name: [list(shape), at] for name, (shape, at) in places.items()})
    # Written by hand: the library's own writer changed its interface within the versions we accept.
    head = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    sink.write(len(head).to_bytes(8, "little") + head)
    for name in sorted(weights):
        sink.write(_bytes(weights[name]))
    return 8 + len(head) + at


def _bytes(bits: np.ndarray) -> memoryview:
    """As they lie in the file."""
    return np.ascontiguousarray(bits, dtype=bits.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data


def decode_anchor(
    blob: bytes | memoryview,
    *,
    version: int | None = None,
    weights_hash: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtypes: Dtypes | None = None,
) -> WeightUpdate:
    """The update that replaces everything. Raises WeightUpdateError.

    `version`, `weights_hash`: what the weight record promises. `shapes`, `dtypes`: the tensors that must be there,
    and their formats.
    """
    return decode_anchor_shards(
        [blob], version=version, weights_hash=weights_hash, shapes=shapes, dtypes=dtypes
    )


def decode_anchor_shards(
    blobs: Sequence[bytes | memoryview],
    *,
    version: int | None = None,
    weights_hash: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtypes: Dtypes | None = None,
) -> WeightUpdate:
    """`decode_anchor` of a version whose ranks each wrote a file of their shards."""
    pieces: dict[str, list[_Piece]] = {}
    stated: set[tuple[int, int]] = set()
    for blob in blobs:
        said, found = _read(blob)
        stated.add(said)
        for piece in found:
            pieces.setdefault(piece.name, []).append(piece)
    if len(stated) != 1:
        raise WeightUpdateError("shards", f"{len(stated)} versions or hashes in {len(blobs)} files")
    ((stated_version, stated_hash),) = stated
    expect("version", stated_version, stated_version if version is None else version)
    expect("weights_hash", stated_hash, stated_hash if weights_hash is None else weights_hash)
    found_shapes = {name: same[0].shape for name, same in pieces.items()}
    if shapes is not None:
        check_same_tensors(shapes, found_shapes)
    patches = [_whole(pieces[name]) for name in sorted(pieces)]
    for patch in patches:
        wanted = patch.dtype if dtypes is None else dtypes.get(patch.name, patch.dtype)
        if patch.dtype is not wanted:
            raise WeightUpdateError("dtype", f"{patch.name} is {patch.dtype}, expected {wanted}")
    hashes = {p.name: tensor_hash(p.bits, p.dtype) for p in patches}
    total = shapes_hash(found_shapes, hashes)
    expect("result_hash", total, stated_hash)
    return WeightUpdate(version=stated_version, patches=tuple(patches), weights_hash=total, hashes=hashes)


def _read(blob: bytes | memoryview) -> tuple[tuple[int, int], list[_Piece]]:
    """((version, weights hash), tensors or shards) of one file."""
    try:
        size = int.from_bytes(blob[:8], "little")
        if not 2 <= size <= min(len(blob) - 8, _HEADER_BYTES):
            raise ValueError(f"a header of {size} bytes in a file of {len(blob)}")
        header = json.loads(bytes(blob[8 : 8 + size]))
        metadata = header.pop("__metadata__")
        if metadata["format"] != ANCHOR_FORMAT:
            raise WeightUpdateError("format", f"{metadata['format']!r}, expected {ANCHOR_FORMAT}")
        digests = json.loads(metadata["sha256"])
        places = json.loads(metadata.get("places", "{}"))
        data = memoryview(blob)[8 + size :]
        pieces, at = [], 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][0] != at:
                raise ValueError(f"{name} begins at {entry['data_offsets'][0]}, expected {at}")
            at = entry["data_offsets"][1]
            pieces.append(_piece(name, entry, data, digests[name], places.get(name)))
        if at != len(data):
            raise ValueError(f"{len(data)} bytes of tensors, {at} described")
        return (int(metadata["version"]), int(metadata["weights_hash"])), pieces
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, MemoryError) as e:
        raise WeightUpdateError("not_an_anchor", f"{type(e).__name__}: {str(e)[:200]}") from None


def _piece(name: str, entry: Any, data: memoryview, digest: str, place: Any) -> _Piece:
    if entry["dtype"] not in _DTYPES:
        raise WeightUpdateError("dtype", f"{name} is {entry['dtype']}, expected one of {', '.join(_DTYPES)}")
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, stop = entry["data_offsets"]
    whole, flat_offset = (shape, 0) if place is None else (tuple(place[0]), place[1])
    for n in (*shape, *whole, flat_offset, start, stop):
        if type(n) is not int or n < 0:
            raise ValueError(f"{name}: {n!r} is no size")
    if math.prod(shape) * dtype.bits.itemsize != stop - start:
        raise ValueError(f"{name} {list(shape)} does not fill {stop - start} bytes")
    if math.prod(shape) > math.prod(whole) - flat_offset:
        raise ValueError(f"{name}: {list(shape)} at {flat_offset} is more than {list(whole)} holds")
    raw = data[start:stop]
    if hashlib.sha256(raw).hexdigest() != digest:
        raise WeightUpdateError("sha256", f"{name}: its bytes are not the ones that were written")
    bits = np.frombuffer(raw, dtype=dtype.bits.newbyteorder("<")).astype(dtype.bits, copy=False)
    return _Piece(name, dtype, whole, flat_offset, bits)


def _whole(pieces: list[_Piece]) -> TensorPatch:
    """One tensor from its shards, which must tile it."""
    pieces = sorted(pieces, key=lambda p: (p.flat_offset, len(p.bits)))
    first, at = pieces[0], 0
    for piece in pieces:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            raise WeightUpdateError("shape", f"{first.name} has two shapes or formats")
        if piece.flat_offset != at:
            raise WeightUpdateError(
                "shards", f"{first.name}: a shard begins at {piece.flat_offset}, not {at}"
            )
        at += len(piece.bits)
    if at != math.prod(first.shape):
        raise WeightUpdateError("shards", f"{first.name}: {at} of {math.prod(first.shape)} elements")
    bits = first.bits if len(pieces) == 1 else np.concatenate([p.bits for p in pieces])
    return TensorPatch(name=first.name, shape=first.shape, indices=None, bits=bits, dtype=first.dtype)
