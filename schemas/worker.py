"""`worker/1`: what a rollout worker has under way, so that several share one capacity. Keyed by worker_id, compacted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .codec import RecordType, require


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One rollout worker, as of `at_ms`."""

    worker_id: str
    policy_id: str
    outstanding: int
    """Rollouts that it has started and whose fate it does not know."""
    at_ms: int = 0


WORKER_SCHEMA = pa.schema(
    [
        pa.field("worker_id", pa.string(), nullable=False),
        pa.field("policy_id", pa.string(), nullable=False),
        pa.field("outstanding", pa.int64(), nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
    ]
)


def check_worker(w: WorkerStatus) -> None:
    """Raise InvalidMessageError where a worker status breaks an invariant."""
    require(bool(w.worker_id and w.policy_id), "missing_id", "an id is empty")
    require(w.outstanding >= 0, "outstanding", f"{w.outstanding}")


def _to_row(w: WorkerStatus) -> dict[str, Any]:
    return {name: getattr(w, name) for name in WORKER_SCHEMA.names}


def _from_row(row: Mapping[str, Any]) -> WorkerStatus:
    return WorkerStatus(**row)


WORKER: RecordType[WorkerStatus] = RecordType(
    name="worker", major=1, schema=WORKER_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_worker
)
