"""`engine/1`: an engine's status and its acknowledgement of weight updates. Keyed by engine_id, compacted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from .codec import RecordType, member, require


class EngineState(StrEnum):
    """Where an engine is in following the weights topic (design section 5)."""

    IDLE = "idle"
    STAGING = "staging"
    PAUSING = "pausing"
    APPLYING = "applying"
    VERIFYING = "verifying"
    RESUMING = "resuming"
    POISONED = "poisoned"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine, as of `at_ms`."""

    engine_id: str
    policy_id: str
    state: EngineState
    version: int
    """The version it serves; -1 before the first."""
    weights_hash: int | None = None
    """Rolling hash (uint64) of the live weights after the last update."""
    latest_version: int = -1
    """Newest version it has seen on the topic."""
    updates: int = 0
    """Updates applied since it started."""
    pause_ms: float | None = None
    """Of the last update: from asking for the pause until tokens flow again; None where it needed none."""
    apply_ms: float | None = None
    stage_ms: float | None = None
    running: int = 0
    """Requests in flight."""
    generated_tokens: int = 0
    """Since it started."""
    url: str | None = None
    """Where it takes requests."""
    reason: str | None = None
    """Of the last failed update."""
    at_ms: int = 0
    paused: bool | None = None
    """Whether the last update stopped tokens; False: it changed no bit, or an operator had stopped them already.
    None before the first, and in records from before there was this column."""
    held: bool | None = None
    """True while an operator holds it paused: it follows the topic and serves nothing."""

    @property
    def behind(self) -> int:
        """Versions between what it serves and the newest that it has seen."""
        return max(0, self.latest_version - self.version)


ENGINE_SCHEMA = pa.schema(
    [
        pa.field("engine_id", pa.string(), nullable=False),
        pa.field("policy_id", pa.string(), nullable=False),
        pa.field("state", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("weights_hash", pa.uint64()),
        pa.field("latest_version", pa.int64(), nullable=False),
        pa.field("updates", pa.int64(), nullable=False),
        pa.field("pause_ms", pa.float64()),
        pa.field("apply_ms", pa.float64()),
        pa.field("stage_ms", pa.float64()),
        pa.field("running", pa.int32(), nullable=False),
        pa.field("generated_tokens", pa.int64(), nullable=False),
        pa.field("url", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("paused", pa.bool_()),
        pa.field("held", pa.bool_()),
    ]
)


def check_engine(e: EngineStatus) -> None:
    """Raise InvalidMessageError where an engine status breaks an invariant."""
    require(bool(e.engine_id and e.policy_id), "missing_id", "an id is empty")
    require(e.version >= -1, "version", f"{e.version}")


def _to_row(e: EngineStatus) -> dict[str, Any]:
    return {name: getattr(e, name) for name in ENGINE_SCHEMA.names} | {"state": e.state.value}


def _from_row(row: Mapping[str, Any]) -> EngineStatus:
    return EngineStatus(**{**row, "state": member(EngineState, row["state"], "state")})


ENGINE: RecordType[EngineStatus] = RecordType(
    name="engine", major=1, schema=ENGINE_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_engine
)
