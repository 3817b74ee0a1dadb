"""`feedback/1`: an outcome that comes after the rollout: accepted, edited, tests passed, thumbs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .codec import RecordType, finite, require
from .task import check_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """One outcome of one rollout. Equal `feedback_id` means the same event."""

    feedback_id: str
    rollout_id: str
    name: str
    """`reward`, or a named signal such as `accepted`."""
    value: float
    event_ms: int
    """Unix milliseconds at which the outcome happened; the last one by this time wins."""
    metadata: str | None = None
    """Free-form JSON."""


FEEDBACK_SCHEMA = pa.schema(
    [
        pa.field("feedback_id", pa.string(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("event_ms", pa.int64(), nullable=False),
        pa.field("metadata", pa.string()),
    ]
)


def check_feedback(f: Feedback) -> None:
    """Raise InvalidMessageError where a feedback record breaks an invariant."""
    require(bool(f.feedback_id and f.rollout_id and f.name), "missing_id", "an id is empty")
    require(finite(f.value), "value_not_finite", f"{f.value}")
    check_json("metadata", f.metadata)


def _to_row(f: Feedback) -> dict[str, Any]:
    return {name: getattr(f, name) for name in FEEDBACK_SCHEMA.names}


def _from_row(row: Mapping[str, Any]) -> Feedback:
    return Feedback(**row)


FEEDBACK: RecordType[Feedback] = RecordType(
    name="feedback", major=1, schema=FEEDBACK_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_feedback
)
