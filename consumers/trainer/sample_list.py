"""Which samples a version was trained on, in order: inside its weight record, or in a blob beside it when they are many.

Everyone who follows a policy reads its weight records, and one must fit its topic's max.message.bytes (8 MiB): at
12 bytes a sample that is reached at 690,000 samples in a step. Far below that a blob is kinder to the readers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pyarrow as pa

from ...schemas.errors import InvalidMessageError
from ...schemas.score import Ref, check_ref
from ...schemas.weights import BlobKind, WeightBlob, WeightRecord
from ...streams.blobs import BlobRef, BlobStore

INLINE_SAMPLES = 16_384
"""More samples than this (200 KB of record) go to the blob store."""

_SCHEMA = pa.schema([pa.field("partition", pa.int32(), False), pa.field("offset", pa.int64(), False)])


def encode_refs(refs: tuple[Ref, ...]) -> bytes:
    """An Arrow IPC stream with the columns partition (int32) and offset (int64), zstd."""
    columns = [
        pa.array([r.partition for r in refs], pa.int32()),
        pa.array([r.offset for r in refs], pa.int64()),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    return sink.getvalue().to_pybytes()


def decode_refs(data: bytes) -> tuple[Ref, ...]:
    """The inverse. Raises InvalidMessageError."""
    try:
        table = pa.ipc.open_stream(data).read_all()
        table.validate(full=True)
        if not table.schema.equals(_SCHEMA):
            raise InvalidMessageError("sample_list", f"columns {table.schema.names}")
        columns = (table.column(name).to_pylist() for name in _SCHEMA.names)
    except pa.ArrowException as e:
        raise InvalidMessageError("sample_list", str(e)) from None
    refs = tuple(Ref(p, o) for p, o in zip(*columns, strict=True))
    for ref in refs:
        check_ref(ref)
    return refs


def with_samples(
    record: WeightRecord, refs: tuple[Ref, ...], put: Callable[[BlobKind, int, bytes], WeightBlob]
) -> WeightRecord:
    """`record` with its samples, in a blob that `put` has stored when they are many."""
    if len(refs) <= INLINE_SAMPLES:
        return dataclasses.replace(record, samples=refs)
    blob = put(BlobKind.SAMPLES, record.version, encode_refs(refs))
    return dataclasses.replace(record, blobs=(*record.blobs, blob))


def samples_of(record: WeightRecord, store: BlobStore) -> tuple[Ref, ...]:
    """The samples of a version, in training order. Raises BlobError and its kinds, InvalidMessageError."""
    refs = list(record.samples)
    for blob in record.blobs_of(BlobKind.SAMPLES):
        refs += decode_refs(store.get(BlobRef(blob.uri, blob.size, blob.sha256)))
    return tuple(refs)
