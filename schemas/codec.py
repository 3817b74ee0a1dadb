"""One record <-> one Arrow IPC stream with one record batch of one row, validated in full on the way in.

A record type pairs a frozen dataclass with a pyarrow schema. Writing checks the record's own invariants, so
that nothing invalid is ever sent; reading trusts nothing: the stream, the schema, the buffers (list offsets
included) and the invariants are checked before a value is touched, and every fault is an
InvalidMessageError with a reason. A reader accepts added nullable columns and refuses a newer major version.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from .errors import InvalidMessageError
from .ipc_claims import claimed_bytes
from .one_row import END_OF_STREAM, LayoutError, OneRow
from .row_columns import is_numeric_list

T = TypeVar("T")

Headers = list[tuple[str, bytes]]
"""Kafka record headers, as kafka-python and aiokafka take and give them."""

SCHEMA_HEADER = "schema"
POLICY_HEADER = "policy"
VERSION_MIN_HEADER = "version-min"
VERSION_MAX_HEADER = "version-max"
TRACE_HEADER = "traceparent"

MAX_DECODED_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class RecordType(Generic[T]):
    """How one kind of record is written and read."""

    name: str
    major: int
    schema: pa.Schema
    to_row: Callable[[T], Mapping[str, Any]]
    """Column name -> value; numpy arrays for list columns of numbers."""
    from_row: Callable[[Mapping[str, Any]], T]
    """The inverse; raises InvalidMessageError where an invariant does not hold."""
    check: Callable[[T], None]
    """Raises InvalidMessageError where an invariant does not hold."""

    @property
    def tag(self) -> str:
        """Value of the `schema` header, such as `trajectory/1`."""
        return f"{self.name}/{self.major}"

    def encode(self, record: T) -> bytes:
        """The record as an Arrow IPC stream; InvalidMessageError when its invariants do not hold."""
        self.check(record)
        row = self.to_row(record)
        try:
            return self._one_row.write(row)
        except LayoutError:
            return self._encode_any(row)

    def decode(self, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ()) -> T:
        """The record in `value`; InvalidMessageError with a reason for anything that is not one."""
        self._check_tag(headers)
        row = self._row_of(value)
        for name in self._required:
            if row[name] is None:
                raise InvalidMessageError("unexpected_null", f"column {name!r} is null")
        record = self.from_row(row)
        self.check(record)
        return record

    def _row_of(self, value: bytes | None) -> dict[str, Any]:
        """The columns of `value`, validated."""
        if value is not None and len(value) <= MAX_DECODED_BYTES:
            try:
                return self._one_row.read(value)
            except LayoutError:
                pass  # another writer's layout, or a fault: pyarrow says which
        return self._row_of_any(value)

    def _row_of_any(self, value: bytes | None) -> dict[str, Any]:
        """The same through pyarrow, whatever the layout."""
        batch = _read_one_batch(value)
        if not batch.schema.equals(self.schema):
            batch = self._conform(batch)
        row = batch.select(self._plain).to_struct_array()[0].as_py()
        for name in self._numeric:
            row[name] = _numbers(batch.column(name))
        return row

    def _encode_any(self, row: Mapping[str, Any]) -> bytes:
        """The stream of `row` through pyarrow, which converts what it can and says what it cannot."""
        # One converter call for the whole row: pa.array per column costs four times as much.
        array = pa.array([row], type=pa.struct(list(self.schema)))
        batch = pa.RecordBatch.from_struct_array(array)
        return self._one_row.head + batch.serialize().to_pybytes() + END_OF_STREAM

    @cached_property
    def _one_row(self) -> OneRow:
        return OneRow(self.schema)

    @cached_property
    def _numeric(self) -> list[str]:
        return [f.name for f in self.schema if is_numeric_list(f.type)]

    @cached_property
    def _plain(self) -> list[str]:
        return [f.name for f in self.schema if not is_numeric_list(f.type)]

    @cached_property
    def _required(self) -> list[str]:
        return [f.name for f in self.schema if not f.nullable]

    def _conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """`batch` with exactly this type's columns: added ones left out, absent nullable ones null."""
        columns = []
        for field in self.schema:
            index = batch.schema.get_field_index(field.name)
            if index < 0:
                if not field.nullable:
                    raise InvalidMessageError("missing_column", f"{self.name} has no column {field.name!r}")
                columns.append(pa.nulls(1, field.type))
                continue
            column = batch.column(index)
            if column.type != field.type:
                raise InvalidMessageError(
                    "wrong_type", f"column {field.name!r} is {column.type}, expected {field.type}"
                )
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, names=self.schema.names)

    def _check_tag(self, headers: Sequence[tuple[str, bytes]]) -> None:
        tag = header(headers, SCHEMA_HEADER)
        if tag is None or tag == self.tag:
            return
        name, _, major = tag.partition("/")
        if name != self.name:
            raise InvalidMessageError("wrong_schema", f"expected {self.tag}, the header says {tag!r}")
        if not major.isdigit() or int(major) > self.major:
            raise InvalidMessageError("newer_major", f"this reader knows {self.tag}, the record is {tag!r}")


def header(headers: Sequence[tuple[str, bytes]], key: str) -> str | None:
    """First header named `key` as text (undecodable bytes replaced), or None."""
    for k, v in headers:
        if k == key:
            return v.decode("utf-8", "replace") if v is not None else None
    return None


def version_headers(tag: str, policy_id: str, version_min: int, version_max: int) -> Headers:
    """The headers that every record about sampled tokens carries, so that readers can filter without decoding."""
    return [
        (SCHEMA_HEADER, tag.encode()),
        (POLICY_HEADER, policy_id.encode()),
        (VERSION_MIN_HEADER, str(version_min).encode()),
        (VERSION_MAX_HEADER, str(version_max).encode()),
    ]


def _numbers(column: pa.Array) -> np.ndarray | None:
    """The one numeric list in `column` as a read-only array, without a copy where the layout allows it."""
    if column.null_count:
        return None
    flat = column.flatten()
    if flat.null_count:
        raise InvalidMessageError("unexpected_null", "null inside a numeric list")
    array = flat.to_numpy(zero_copy_only=not pa.types.is_boolean(flat.type))
    array.flags.writeable = False
    return array


def _read_one_batch(value: bytes | None) -> pa.RecordBatch:
    if not value:
        raise InvalidMessageError("empty_value", "the record has no value")
    try:
        if claimed_bytes(value) > MAX_DECODED_BYTES:
            raise InvalidMessageError("too_large", f"more than {MAX_DECODED_BYTES} bytes decoded")
        with pa.ipc.open_stream(pa.py_buffer(value)) as reader:
            batch = reader.read_next_batch()
            if batch.get_total_buffer_size() > MAX_DECODED_BYTES:
                raise InvalidMessageError("too_large", f"more than {MAX_DECODED_BYTES} bytes decoded")
            batch.validate(full=True)
            try:
                reader.read_next_batch()
            except StopIteration:
                pass
            else:
                raise InvalidMessageError("not_one_batch", "more than one record batch")
    except InvalidMessageError:
        raise
    except StopIteration:
        raise InvalidMessageError("not_one_batch", "no record batch") from None
    except (pa.ArrowException, OSError, ValueError, MemoryError, UnicodeDecodeError, struct.error) as e:
        raise InvalidMessageError("not_arrow", f"{type(e).__name__}: {str(e)[:200]}") from None
    if batch.num_rows != 1:
        raise InvalidMessageError("not_one_row", f"{batch.num_rows} rows")
    return batch


E = TypeVar("E", bound=StrEnum)


def member(kind: type[E], value: str, reason: str) -> E:
    """The member of `kind` that is written `value`; InvalidMessageError(reason) if there is none."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidMessageError(reason, f"{value!r} is none of {', '.join(kind)}") from None


def require(condition: bool, reason: str, detail: str = "") -> None:
    """InvalidMessageError(reason) unless `condition`."""
    if not condition:
        raise InvalidMessageError(reason, detail)


def finite(value: float | None) -> bool:
    """True for None and for finite numbers."""
    return value is None or math.isfinite(value)
