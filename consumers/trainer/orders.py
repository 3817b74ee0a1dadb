"""What rank 0 tells the other ranks to do with it, and the rows of a step on their way to them."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np
import pyarrow as pa

from ...schemas.weights import WEIGHTS, WeightRecord
from .batch import Row
from .team import Team


class Order(StrEnum):
    """One thing that all ranks do together."""

    STEP = "step"
    """Train the rows that follow."""
    HASH = "hash"
    """Add up the weights' hash."""
    ADOPT = "adopt"
    """Take the weights that the weight records which follow lead to."""
    STAND = "stand"
    """The present weights are those of the version that follows: the next delta goes on top of them."""
    ENCODE = "encode"
    """Store this rank's part of the next version."""
    SETTLE = "settle"
    """That version is in the log."""
    SAVE = "save"
    """Write this rank's part of a checkpoint."""
    LOAD = "load"
    """Go back to a checkpoint."""
    STOP = "stop"
    """End."""


def tell(team: Team, order: Order, body: Callable[[], bytes] = bytes) -> None:
    """Rank 0: send an order. Another rank that calls it is carrying that order out, and sends nothing."""
    if team.size > 1 and team.rank == 0:
        team.broadcast(order.value.encode() + b"\n" + body())


def hear(team: Team) -> tuple[Order, bytes]:
    """Another rank: wait for the next order. TeamError when rank 0 is gone."""
    order, _, body = team.broadcast(b"").partition(b"\n")
    return Order(order.decode()), body


def encode_records(records: Sequence[WeightRecord]) -> bytes:
    """Weight records, without the samples that made them."""
    values = (WEIGHTS.encode(dataclasses.replace(r, samples=())) for r in records)
    return json.dumps([base64.b64encode(v).decode() for v in values]).encode()


def decode_records(data: bytes) -> list[WeightRecord]:
    """The inverse."""
    return [WEIGHTS.decode(base64.b64decode(v), []) for v in json.loads(data)]


_LISTS = {
    "token_ids": (pa.int32(), np.int32),
    "loss_mask": (pa.bool_(), np.bool_),
    "behaviour": (pa.float32(), np.float32),
    "advantages": (pa.float32(), np.float32),
}
_SCHEMA = pa.schema(
    [(name, pa.list_(kind)) for name, (kind, _) in _LISTS.items()] + [("temperature", pa.float64())]
)


def encode_rows(rows: Sequence[Row]) -> bytes:
    """An Arrow IPC stream with a row for each, bit for bit."""
    offsets = pa.array(np.cumsum([0] + [len(r.token_ids) for r in rows], dtype=np.int32))
    columns: list[pa.Array] = []
    for name, (kind, dtype) in _LISTS.items():
        flat = np.concatenate([np.asarray(getattr(r, name), dtype=dtype) for r in rows])
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(flat, kind)))
    columns.append(pa.array([r.temperature for r in rows], pa.float64()))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    return sink.getvalue().to_pybytes()


def decode_rows(data: bytes) -> list[Row]:
    """The inverse."""
    table = pa.ipc.open_stream(data).read_all().combine_chunks()
    lists = {name: [v.values.to_numpy(zero_copy_only=False) for v in table.column(name)] for name in _LISTS}
    temperatures = table.column("temperature").to_pylist()
    return [
        Row(**{name: column[i] for name, column in lists.items()}, temperature=temperature)
        for i, temperature in enumerate(temperatures)
    ]
