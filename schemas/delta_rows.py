"""The container of a delta: one Arrow IPC stream with a row for each changed range of a tensor.

The schema's metadata says what the blob goes on top of; the last batch carries the totals, which are known only
when all is written, and its absence gives a truncated blob away. Rows are written and read batch by batch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa

from .bitcodec import Packed, What, Where
from .dtypes import Dtype
from .errors import WeightUpdateError
from .frames import Buffer
from .ipc_claims import claimed_bytes

FORMAT = "headrace-delta/2"

DELTA_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("flat_offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("where", pa.string(), nullable=False),
        pa.field("what", pa.string(), nullable=False),
        pa.field("nnz", pa.int64(), nullable=False),
        pa.field("split", pa.int32(), nullable=False),
        pa.field("frames", pa.list_(pa.large_binary()), nullable=False),
        pa.field("base_hash", pa.uint64(), nullable=False),
        pa.field("new_hash", pa.uint64(), nullable=False),
    ]
)
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The change of [flat_offset, flat_offset + length) of a tensor of `shape`."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    flat_offset: int
    length: int
    packed: Packed
    base_hash: int
    """Tensor hash, before, of what the writer holds of the tensor: all of it, or its shard."""
    new_hash: int
    """The same, after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a blob says of itself before its rows."""

    base_version: int
    version: int
    shard: int
    shards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What it says after them."""

    rows: int
    base_hash: int | None
    """Set hash (uint64) of the base; None in a shard, whose writer does not know it."""
    weights_hash: int | None
    """Set hash of the new version; None in a shard."""


class RowWriter:
    """Writes rows to a file-like object as they come."""

    def __init__(self, sink: BinaryIO, header: Header) -> None:
        stated = {"format": FORMAT} | {name: str(getattr(header, name)) for name in Header.__slots__}
        self._schema = DELTA_SCHEMA.with_metadata(stated)
        self._writer = pa.ipc.new_stream(sink, self._schema)
        self._rows: list[dict[str, Any]] = []
        self._bytes = self._count = 0

    def write(self, row: Row) -> None:
        """Add one; it may wait in memory until a batch is full."""
        packed = row.packed
        plain = {
            name: getattr(row, name) for name in ("name", "flat_offset", "length", "base_hash", "new_hash")
        }
        self._rows.append(
            plain
            | {"dtype": row.dtype.value, "shape": list(row.shape)}
            | {"where": packed.where.value, "what": packed.what.value, "nnz": packed.nnz}
            | {"split": packed.split, "frames": list(packed.frames)}
        )
        self._count += 1
        self._bytes += packed.size
        if self._bytes >= _BATCH_BYTES:
            self._writer.write_batch(self._batch())

    def close(self, base_hash: int | None, weights_hash: int | None) -> None:
        """Write the rest and the totals; the sink stays open."""
        totals = {"rows": self._count, "base_hash": base_hash, "weights_hash": weights_hash}
        self._writer.write_batch(self._batch(), custom_metadata={"totals": json.dumps(totals)})
        self._writer.close()

    def _batch(self) -> pa.RecordBatch:
        batch = pa.RecordBatch.from_pylist(self._rows, schema=self._schema)
        self._rows, self._bytes = [], 0
        return batch


class RowReader:
    """Reads them: `header` at once, then the rows, then `footer`. WeightUpdateError for what is no delta.

    The buffers of a row may lie in the blob itself, or in the one batch that is in memory.
    """

    def __init__(self, source: bytes | memoryview | BinaryIO) -> None:
        """`source`: the whole blob, or a binary file to read it from."""
        view = isinstance(source, bytes | memoryview)
        with _refusing():
            # Our writers compress inside the columns, under limits that readers know.
            if claimed_bytes(source):
                raise WeightUpdateError("not_a_delta", "a batch that Arrow compressed")
            self._reader = pa.ipc.open_stream(pa.py_buffer(source) if view else source)
            schema = self._reader.schema
            if not schema.equals(DELTA_SCHEMA):
                raise WeightUpdateError("schema", f"columns {', '.join(schema.names)}")
            stated = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
            if stated.get("format") != FORMAT:
                raise WeightUpdateError("format", f"{stated.get('format')!r}, expected {FORMAT}")
            self.header = Header(**{name: int(stated[name]) for name in Header.__slots__})
        self.footer: Footer | None = None

    def __iter__(self) -> Iterator[Row]:
        count = 0
        while True:
            with _refusing():
                try:
                    batch, metadata = self._reader.read_next_batch_with_custom_metadata()
                except StopIteration:
                    break
                if self.footer is not None:
                    raise WeightUpdateError("not_a_delta", "a batch after the totals")
                batch.validate(full=True)
                rows = _rows(batch)
                count += len(rows)
                self.footer = _footer(metadata)
            yield from rows
        if self.footer is None or self.footer.rows != count:
            raise WeightUpdateError("not_a_delta", f"cut off after {count} rows")


class _refusing:
    """Errors of Arrow and of parsing become WeightUpdateError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(
            error,
            pa.ArrowException | OSError | ValueError | KeyError | TypeError | MemoryError | struct.error,
        ):
            raise WeightUpdateError("not_a_delta", f"{type(error).__name__}: {str(error)[:200]}") from None


def _rows(batch: pa.RecordBatch) -> list[Row]:
    nested = [batch.column(name).values for name in ("shape", "frames")]
    if any(column.null_count for column in (*batch.columns, *nested)):
        raise WeightUpdateError("not_a_delta", "a null in a row")
    frames = batch.column("frames")
    plain = batch.drop_columns(["frames"]).to_pylist()
    return [_row(row, [_view(frame) for frame in frames[i].values]) for i, row in enumerate(plain)]


def _row(row: dict[str, Any], buffers: list[Buffer]) -> Row:
    name = row["name"]
    try:
        where, what, dtype = Where(row["where"]), What(row["what"]), Dtype(row["dtype"])
    except ValueError as e:
        raise WeightUpdateError("codec", f"{name}: {e}") from None
    if any(n < 0 for n in (*row["shape"], row["flat_offset"], row["length"], row["split"])):
        raise WeightUpdateError("not_a_delta", f"{name}: a negative size")
    return Row(
        name=name,
        dtype=dtype,
        shape=tuple(row["shape"]),
        flat_offset=row["flat_offset"],
        length=row["length"],
        packed=Packed(where, what, row["nnz"], row["split"], tuple(buffers)),
        base_hash=row["base_hash"],
        new_hash=row["new_hash"],
    )


def _view(scalar: pa.LargeBinaryScalar) -> Buffer:
    buffer = scalar.as_buffer()
    return b"" if buffer is None else memoryview(buffer)


def _footer(metadata: pa.KeyValueMetadata | None) -> Footer | None:
    if metadata is None or b"totals" not in metadata:
        return None
    totals = json.loads(metadata[b"totals"])
    given = {name: totals[name] for name in Footer.__slots__}
    if not all(isinstance(v, int) or (v is None and name != "rows") for name, v in given.items()):
        raise ValueError(f"totals {given}")
    return Footer(**given)
