"""Weights between two versions, without loss: anchors hold everything, deltas what changed.

A delta is one Arrow IPC stream with a row per changed tensor; an anchor is a safetensors file. Decoding
checks everything (versions, hashes, names, shapes, positions, sizes) and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from . import bitcodec
from .anchor import decode_anchor, encode_anchor
from .errors import WeightUpdateError
from .update import (
    TensorPatch,
    Weights,
    WeightUpdate,
    apply_update,
    check_same_tensors,
    expect,
    unknown_tensor,
    weights_of,
)
from .weight_hash import replace_entry, set_hash, tensor_hashes, update_hash

__all__ = [
    "EncodedDelta",
    "TensorPatch",
    "WeightUpdate",
    "Weights",
    "apply_update",
    "decode_anchor",
    "decode_delta",
    "encode_anchor",
    "encode_delta",
    "weights_of",
]

FORMAT = "headrace-delta/1"

DELTA_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("codec", pa.string(), nullable=False),
        pa.field("nnz", pa.int64(), nullable=False),
        pa.field("gap", pa.large_binary(), nullable=False),
        pa.field("val", pa.large_binary(), nullable=False),
        pa.field("esc", pa.large_binary(), nullable=False),
        pa.field("base_hash", pa.uint64(), nullable=False),
        pa.field("new_hash", pa.uint64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """A delta's bytes and what the weight record says of them."""

    blob: bytes
    changed: int
    """Elements."""
    base_hash: int
    weights_hash: int
    hashes: Mapping[str, int]
    """Tensor hash of every tensor of the new version: the next delta's `base_hashes`."""


def encode_delta(
    base: Weights,
    new: Weights,
    *,
    base_version: int,
    version: int,
    base_hashes: Mapping[str, int] | None = None,
) -> EncodedDelta:
    """What leads from `base` to `new`, which must have the same names and shapes (else WeightUpdateError).

    `base_hashes`: the tensor hashes of `base` where they are known; without them all of `base` is hashed.
    """
    check_same_tensors({n: b.shape for n, b in base.items()}, {n: b.shape for n, b in new.items()})
    hashes = dict(tensor_hashes(base) if base_hashes is None else base_hashes)
    base_hash = set_hash(base, hashes)
    rows, count = [], 0
    for name in sorted(base):
        old_bits, new_bits = base[name].reshape(-1), new[name].reshape(-1)
        indices = bitcodec.changed(old_bits, new_bits)
        if not len(indices):
            continue
        packed = bitcodec.pack(indices, old_bits, new_bits)
        before = hashes[name]
        hashes[name] = update_hash(before, indices, old_bits[indices], new_bits[indices])
        count += len(indices)
        rows.append(
            {
                "name": name,
                "shape": list(base[name].shape),
                "codec": packed.codec.value,
                "nnz": packed.nnz,
                "gap": packed.gap,
                "val": packed.val,
                "esc": packed.esc,
                "base_hash": before,
                "new_hash": hashes[name],
            }
        )
    weights_hash = set_hash(new, hashes)
    metadata: dict[str, str | int] = {
        "format": FORMAT,
        "base_version": base_version,
        "version": version,
        "base_hash": base_hash,
        "weights_hash": weights_hash,
    }
    return EncodedDelta(
        blob=_write(rows, metadata),
        changed=count,
        base_hash=base_hash,
        weights_hash=weights_hash,
        hashes=hashes,
    )


def decode_delta(
    blob: bytes,
    base: Weights,
    *,
    base_version: int,
    version: int | None = None,
    base_hashes: Mapping[str, int] | None = None,
    weights_hash: int | None = None,
) -> WeightUpdate:
    """The update in `blob`, fit for exactly `base`. Raises WeightUpdateError; `base` is only read.

    `version`, `weights_hash`: what the weight record promises. `base_hashes`: the tensor hashes of `base`
    where they are known; without them all of `base` is hashed.
    """
    table, metadata = _read(blob)
    expect("base_version", metadata["base_version"], base_version)
    if version is not None:
        expect("version", metadata["version"], version)
    if weights_hash is not None:
        expect("weights_hash", metadata["weights_hash"], weights_hash)
    hashes = tensor_hashes(base) if base_hashes is None else base_hashes
    total = set_hash(base, hashes)
    expect("base_hash", metadata["base_hash"], total)
    patches: dict[str, TensorPatch] = {}
    for row in table:
        name = row["name"]
        if name in patches:
            raise WeightUpdateError("duplicate_tensor", name)
        patches[name] = _patch(row, base, hashes)
        total = replace_entry(total, name, base[name].shape, hashes[name], row["new_hash"])
    expect("result_hash", total, metadata["weights_hash"])
    return WeightUpdate(
        version=metadata["version"],
        base_version=base_version,
        patches=tuple(patches.values()),
        weights_hash=total,
        hashes={row["name"]: row["new_hash"] for row in table},
    )


def _patch(row: Mapping[str, Any], base: Weights, hashes: Mapping[str, int]) -> TensorPatch:
    name, shape = row["name"], tuple(row["shape"])
    if name not in base:
        raise WeightUpdateError("unknown_tensor", unknown_tensor(name, base))
    if shape != base[name].shape:
        raise WeightUpdateError("shape", f"{name} is {list(base[name].shape)}, the delta says {list(shape)}")
    expect("tensor_base_hash", row["base_hash"], hashes[name], name)
    try:
        codec = bitcodec.Codec(row["codec"])
    except ValueError:
        raise WeightUpdateError("codec", f"{name} is written as {row['codec']!r}") from None
    old = base[name].reshape(-1)
    packed = bitcodec.Packed(codec, row["nnz"], row["gap"], row["val"], row["esc"])
    try:
        indices, bits = bitcodec.unpack(packed, old)
    except WeightUpdateError as e:
        raise WeightUpdateError(e.reason, f"{name}: {e.detail}") from None
    where = np.arange(len(old)) if indices is None else indices
    result = update_hash(hashes[name], where, old[where], bits)
    expect("tensor_hash", result, row["new_hash"], name)
    return TensorPatch(name=name, shape=shape, indices=indices, bits=bits)


def _write(rows: list[dict[str, Any]], metadata: Mapping[str, str | int]) -> bytes:
    schema = DELTA_SCHEMA.with_metadata({k: str(v) for k, v in metadata.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    return sink.getvalue().to_pybytes()


def _read(blob: bytes) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    try:
        with pa.ipc.open_stream(pa.py_buffer(blob)) as reader:
            schema = reader.schema
            if not schema.equals(DELTA_SCHEMA):
                raise WeightUpdateError("schema", f"columns {', '.join(schema.names)}")
            batches = list(reader)
            for batch in batches:
                batch.validate(full=True)
            rows = [row for batch in batches for row in batch.to_pylist()]
        stated = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
        if stated.get("format") != FORMAT:
            raise WeightUpdateError("format", f"{stated.get('format')!r}, expected {FORMAT}")
        numbers = {k: int(stated[k]) for k in ("base_version", "version", "base_hash", "weights_hash")}
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as e:
        raise WeightUpdateError("not_a_delta", f"{type(e).__name__}: {str(e)[:200]}") from None
    if len(batches) != 1:
        raise WeightUpdateError("not_a_delta", f"{len(batches)} record batches, expected one")
    for row in rows:
        if any(v is None for v in row.values()) or any(n is None or n < 0 for n in row["shape"]):
            raise WeightUpdateError("not_a_delta", "a null or a negative size in a row")
    return rows, numbers
