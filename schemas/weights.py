"""`weights/1`: one manifest per policy version, in order: what made it and where its bits lie.

A version has a delta blob, an anchor blob, or both (version 0 has an anchor only). The record names the
samples that were trained, in order, so that anyone can redo the step from the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

from .codec import RecordType, member, require
from .score import REF_TYPE, Ref, check_ref, ref_from_row, ref_to_row
from .task import check_json


class BlobKind(StrEnum):
    """What a blob holds."""

    ANCHOR = "anchor"
    """All tensors."""
    DELTA = "delta"
    """What changed since `base_version`."""
    SAMPLES = "samples"
    """The sample records that made this step, where they are too many for the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBlob:
    """One shard of a version's weights in the blob store."""

    kind: BlobKind
    uri: str
    size: int
    """Bytes."""
    sha256: str
    """Hex digest of the blob's bytes."""
    shard: int = 0
    shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRecord:
    """Policy version `version` of `policy_id`."""

    policy_id: str
    version: int
    base_version: int | None
    """version - 1 when there is a delta; None for an anchor alone."""
    base_hash: int | None
    """Rolling hash (uint64) of the base's weights."""
    weights_hash: int
    """Rolling hash (uint64) of this version's weights: schemas/delta.py."""
    blobs: tuple[WeightBlob, ...]
    samples: tuple[Ref, ...] = ()
    """The sample records that made this step, in training order (partition, offset of the `samples` topic); empty
    where a blob of kind SAMPLES holds them (consumers/trainer/sample_list.py reads either)."""
    consumed: tuple[tuple[int, int], ...] = ()
    """(partition, next offset) of `samples` after this step: what the trainer has finished with."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> count of sample records passed over since the previous version, at the gate or here."""
    changed_elements: int = 0
    total_elements: int = 0
    full_bytes: int = 0
    """Bytes of all tensors, uncompressed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Step statistics: reward_mean, lag_mean, lag_max, entropy, grad_norm, ..."""
    config_hash: str = ""
    """Of the trainer settings that decide the step's arithmetic."""
    created_ms: int = 0

    def blobs_of(self, kind: BlobKind) -> tuple[WeightBlob, ...]:
        """The shards of one kind, in shard order."""
        return tuple(sorted((b for b in self.blobs if b.kind is kind), key=lambda b: b.shard))

    @property
    def trained(self) -> int:
        """How many samples made this step, wherever their list is."""
        return len(self.samples) or int(self.metrics.get("samples", 0))

    @property
    def has_anchor(self) -> bool:
        """True when all tensors of this version can be loaded by themselves."""
        return bool(self.blobs_of(BlobKind.ANCHOR))

    @property
    def has_delta(self) -> bool:
        """True when this version can be reached from its base."""
        return bool(self.blobs_of(BlobKind.DELTA))


BLOB_TYPE = pa.struct(
    [
        ("kind", pa.string()),
        ("uri", pa.string()),
        ("size", pa.int64()),
        ("sha256", pa.string()),
        ("shard", pa.int32()),
        ("shards", pa.int32()),
    ]
)
CONSUMED_TYPE = pa.struct([("partition", pa.int32()), ("next_offset", pa.int64())])

WEIGHTS_SCHEMA = pa.schema(
    [
        pa.field("policy_id", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("base_version", pa.int64()),
        pa.field("base_hash", pa.uint64()),
        pa.field("weights_hash", pa.uint64(), nullable=False),
        pa.field("blobs", pa.list_(BLOB_TYPE), nullable=False),
        pa.field("samples", pa.list_(REF_TYPE), nullable=False),
        pa.field("consumed", pa.list_(CONSUMED_TYPE), nullable=False),
        pa.field("dropped", pa.string(), nullable=False),
        pa.field("changed_elements", pa.int64(), nullable=False),
        pa.field("total_elements", pa.int64(), nullable=False),
        pa.field("full_bytes", pa.int64(), nullable=False),
        pa.field("metrics", pa.string(), nullable=False),
        pa.field("config_hash", pa.string(), nullable=False),
        pa.field("created_ms", pa.int64(), nullable=False),
    ]
)


def check_weights(w: WeightRecord) -> None:
    """Raise InvalidMessageError where a weight record breaks an invariant."""
    require(bool(w.policy_id), "missing_id", "policy_id is empty")
    require(w.version >= 0, "version", f"{w.version}")
    require(bool(w.blobs), "blobs", "a version without blobs")
    for kind in BlobKind:
        shards = w.blobs_of(kind)
        require(
            all(b.shards == len(shards) and b.shard == i for i, b in enumerate(shards)),
            "shards",
            f"the {kind} shards are not 0..n-1",
        )
    for b in w.blobs:
        require(b.size > 0 and len(b.sha256) == 64 and bool(b.uri), "blob", f"{b.kind} {b.uri!r}")
    if w.has_delta:
        require(w.base_version == w.version - 1, "base_version", f"{w.base_version} under {w.version}")
        require(w.base_hash is not None, "base_hash", "a delta names its base's hash")
    for ref in w.samples:
        check_ref(ref)


def _to_row(w: WeightRecord) -> dict[str, Any]:
    return {name: getattr(w, name) for name in WEIGHTS_SCHEMA.names} | {
        "blobs": [
            {name: getattr(b, name) for name in BLOB_TYPE.names} | {"kind": b.kind.value} for b in w.blobs
        ],
        "samples": [ref_to_row(r) for r in w.samples],
        "consumed": [{"partition": p, "next_offset": o} for p, o in w.consumed],
        "dropped": json.dumps(dict(w.dropped)),
        "metrics": json.dumps(dict(w.metrics)),
    }


def _from_row(row: Mapping[str, Any]) -> WeightRecord:
    for column in ("blobs", "samples", "consumed"):
        for item in row[column]:
            require(
                item is not None and all(v is not None for v in item.values()),
                column,
                f"null inside {column}",
            )
    return WeightRecord(
        **{
            **row,
            "blobs": tuple(
                WeightBlob(**{**b, "kind": member(BlobKind, b["kind"], "blob")}) for b in row["blobs"]
            ),
            "samples": tuple(ref_from_row(r) for r in row["samples"]),
            "consumed": tuple((c["partition"], c["next_offset"]) for c in row["consumed"]),
            "dropped": _number_map("dropped", row["dropped"]),
            "metrics": _number_map("metrics", row["metrics"]),
        }
    )


def _number_map(name: str, text: str) -> dict[str, Any]:
    check_json(name, text)
    value = json.loads(text)
    require(
        isinstance(value, dict) and all(isinstance(v, int | float) for v in value.values()),
        name,
        "not a map from names to numbers",
    )
    return value


WEIGHTS: RecordType[WeightRecord] = RecordType(
    name="weights", major=1, schema=WEIGHTS_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_weights
)
