"""Weights between two versions, without loss: anchors hold everything, deltas what changed.

A delta is one Arrow IPC stream with a row per changed range of a tensor (delta_rows.py); an anchor is a
safetensors file. Decoding checks everything (versions, hashes, names, formats, shapes, positions, sizes) and
writes nothing.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from .anchor import decode_anchor, encode_anchor
from .compose import compose, merge
from .delta_decode import decode_rows
from .delta_encode import Change, DeltaTotals, write_delta
from .delta_rows import DELTA_SCHEMA, FORMAT, Row, RowReader
from .dtypes import Dtypes, dtype_of
from .errors import WeightUpdateError
from .update import (
    TensorPatch,
    Weights,
    WeightUpdate,
    apply_update,
    check_same_tensors,
    expect,
    weights_of,
)
from .weight_hash import replace_entry, set_hash, tensor_hashes

__all__ = [
    "DELTA_SCHEMA",
    "FORMAT",
    "Change",
    "DeltaTotals",
    "EncodedDelta",
    "TensorPatch",
    "WeightUpdate",
    "Weights",
    "apply_update",
    "compose",
    "decode_anchor",
    "decode_delta",
    "decode_shards",
    "encode_anchor",
    "encode_delta",
    "merge",
    "read_patches",
    "weights_of",
    "write_delta",
]


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
    dtypes: Dtypes | None = None,
    threads: int = 1,
) -> EncodedDelta:
    """What leads from `base` to `new`, which must have the same names and shapes (else WeightUpdateError).

    `base_hashes`: the tensor hashes of `base` where they are known; without them all of `base` is hashed. Arrays of
    `new` may also be float32, to be rounded. A model too large for this: `write_delta`.
    """
    check_same_tensors({n: b.shape for n, b in base.items()}, {n: b.shape for n, b in new.items()})
    changes = (
        Change(
            name=name,
            old=base[name],
            new=new[name],
            dtype=dtype_of(name, base[name], dtypes),
            base_hash=None if base_hashes is None else base_hashes[name],
        )
        for name in sorted(base)
    )
    sink = io.BytesIO()
    totals = write_delta(sink, changes, base_version=base_version, version=version, threads=threads)
    assert totals.base_hash is not None and totals.weights_hash is not None
    return EncodedDelta(
        blob=sink.getvalue(),
        changed=totals.changed,
        base_hash=totals.base_hash,
        weights_hash=totals.weights_hash,
        hashes=totals.hashes,
    )


def decode_delta(
    blob: bytes | memoryview,
    base: Weights,
    *,
    base_version: int,
    version: int | None = None,
    base_hashes: Mapping[str, int] | None = None,
    weights_hash: int | None = None,
    dtypes: Dtypes | None = None,
    threads: int = 1,
) -> WeightUpdate:
    """The update in `blob`, fit for exactly `base`. Raises WeightUpdateError; `base` is only read.

    `version`, `weights_hash`: what the weight record promises. `base_hashes`: the tensor hashes of `base`
    where they are known; without them all of `base` is hashed.
    """
    reader = RowReader(blob)
    _check_header(reader, base_version, version, shards=1)
    rows = list(reader)
    assert reader.footer is not None
    if weights_hash is not None:
        expect("weights_hash", reader.footer.weights_hash, weights_hash)
    hashes = tensor_hashes(base, dtypes) if base_hashes is None else base_hashes
    expect("base_hash", reader.footer.base_hash, set_hash(base, hashes))
    update = _update(reader, rows, base, hashes, dtypes, whole=True, threads=threads)
    expect("result_hash", update.weights_hash, reader.footer.weights_hash)
    return update


def decode_shards(
    blobs: Sequence[bytes | memoryview],
    base: Weights,
    *,
    base_version: int,
    version: int | None = None,
    base_hashes: Mapping[str, int] | None = None,
    weights_hash: int | None = None,
    dtypes: Dtypes | None = None,
    threads: int = 1,
) -> WeightUpdate:
    """The update that all shards of a version make together: `decode_delta` for any number of ranks.

    `blobs`: in shard order. `base`: whole tensors, whatever the ranks held of them.
    """
    if len(blobs) == 1 and RowReader(blobs[0]).header.shards == 1:
        return decode_delta(
            blobs[0],
            base,
            base_version=base_version,
            version=version,
            base_hashes=base_hashes,
            weights_hash=weights_hash,
            dtypes=dtypes,
            threads=threads,
        )
    hashes = tensor_hashes(base, dtypes) if base_hashes is None else base_hashes
    updates = []
    for number, blob in enumerate(blobs):
        reader = RowReader(blob)
        _check_header(reader, base_version, version, shards=len(blobs), shard=number)
        updates.append(_update(reader, reader, base, hashes, dtypes, whole=False, threads=threads))
    return merge(updates, base, base_hashes=hashes, weights_hash=weights_hash)


def read_patches(
    source: BinaryIO,
    base: Weights,
    *,
    base_version: int,
    version: int | None = None,
    base_hashes: Mapping[str, int],
    weights_hash: int | None = None,
    dtypes: Dtypes | None = None,
    threads: int = 1,
) -> Iterator[tuple[TensorPatch, int]]:
    """(patch, its tensor hash afterwards), tensor by tensor, from a file too large for memory.

    What is wrong with the whole (a wrong total, a cut-off end) is known only when it is exhausted: run through it
    once to validate, `base` being only read, and apply on a second run. Raises WeightUpdateError.
    """
    reader = RowReader(source)
    _check_header(reader, base_version, version, shards=1)
    before = total = set_hash(base, base_hashes)
    for patch, h in decode_rows(reader, base, base_hashes, dtypes=dtypes, whole=True, threads=threads):
        total = replace_entry(total, patch.name, patch.shape, base_hashes[patch.name], h)
        yield patch, h
    assert reader.footer is not None
    expect("base_hash", reader.footer.base_hash, before)
    expect("result_hash", total, reader.footer.weights_hash)
    if weights_hash is not None:
        expect("weights_hash", total, weights_hash)


def _update(
    reader: RowReader,
    rows: RowReader | Sequence[Row],
    base: Weights,
    hashes: Mapping[str, int],
    dtypes: Dtypes | None,
    *,
    whole: bool,
    threads: int,
) -> WeightUpdate:
    total, patches, after = set_hash(base, hashes), [], {}
    for patch, h in decode_rows(rows, base, hashes, dtypes=dtypes, whole=whole, threads=threads):
        total = replace_entry(total, patch.name, patch.shape, hashes[patch.name], h)
        patches.append(patch)
        after[patch.name] = h
    return WeightUpdate(
        version=reader.header.version,
        base_version=reader.header.base_version,
        patches=tuple(patches),
        weights_hash=total,
        hashes=after,
    )


def _check_header(
    reader: RowReader, base_version: int, version: int | None, *, shards: int, shard: int = 0
) -> None:
    header = reader.header
    expect("base_version", header.base_version, base_version)
    if version is not None:
        expect("version", header.version, version)
    if (header.shard, header.shards) != (shard, shards):
        raise WeightUpdateError(
            "shards", f"shard {header.shard} of {header.shards}, expected {shard} of {shards}"
        )
