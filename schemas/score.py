"""`score/1`: the reward of a trajectory and the verifier's status. Thin: it points at the payload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from .codec import RecordType, finite, member, require
from .task import check_json
from .trajectory import STAMPS_TYPE, Split, stamps_from_row, stamps_to_row


class ScoreStatus(StrEnum):
    """What the verifier found. The three are never mixed up."""

    SCORED = "scored"
    """The reward function gave a finite number."""
    FAILED = "failed"
    """The policy failed (its output cannot be scored, by rule): the configured failure reward. Trained."""
    VOID = "void"
    """The infrastructure failed: not trained, not in the baseline; still a terminal marker of its group."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Where the payload lies: a record of the `trajectories` topic."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One trajectory's score; a rollout's trajectories share its reward."""

    trajectory_id: str
    rollout_id: str
    trajectory_index: int
    trajectory_count: int
    group_id: str
    group_size: int
    group_deadline_ms: int
    task_id: str
    policy_id: str
    split: Split
    status: ScoreStatus
    reason: str | None = None
    """Why it failed or is void."""
    reward: float | None = None
    """Finite unless void, then None."""
    components: str | None = None
    """JSON object: component name -> number."""
    turn_rewards: tuple[float, ...] | None = None
    """[turns] finite, where the reward is per turn; `reward` is their sum then."""
    version_min: int
    version_max: int
    total_tokens: int
    sampled_tokens: int
    truncated: bool
    ref: Ref
    stamps: tuple[tuple[str, int], ...] = ()


REF_TYPE = pa.struct([("partition", pa.int32()), ("offset", pa.int64())])

SCORE_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("trajectory_index", pa.int32(), nullable=False),
        pa.field("trajectory_count", pa.int32(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("group_size", pa.int32(), nullable=False),
        pa.field("group_deadline_ms", pa.int64(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("policy_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("components", pa.string()),
        pa.field("turn_rewards", pa.list_(pa.float64())),
        pa.field("version_min", pa.int64(), nullable=False),
        pa.field("version_max", pa.int64(), nullable=False),
        pa.field("total_tokens", pa.int32(), nullable=False),
        pa.field("sampled_tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("ref", REF_TYPE, nullable=False),
        pa.field("stamps", STAMPS_TYPE, nullable=False),
    ]
)


def check_score(s: Score) -> None:
    """Raise InvalidMessageError where a score breaks an invariant."""
    require(bool(s.trajectory_id and s.rollout_id and s.group_id), "missing_id", "an id is empty")
    require(s.group_size >= 1, "group_size", f"{s.group_size}")
    require(
        0 <= s.trajectory_index < s.trajectory_count,
        "trajectory_index",
        f"{s.trajectory_index} of {s.trajectory_count}",
    )
    if s.status is ScoreStatus.VOID:
        require(s.reward is None, "reward", "a void score has no reward")
        require(bool(s.reason), "reason", "a void score says why")
    else:
        require(s.reward is not None and finite(s.reward), "reward_not_finite", f"{s.reward}")
    if s.turn_rewards is not None:
        require(all(map(math.isfinite, s.turn_rewards)), "reward_not_finite", "turn_rewards")
    check_ref(s.ref)
    check_json("components", s.components)


def check_ref(ref: Ref) -> None:
    """Raise InvalidMessageError unless `ref` can point at a record."""
    require(ref.partition >= 0 and ref.offset >= 0, "ref", f"{ref.partition}:{ref.offset}")


def ref_to_row(ref: Ref) -> dict[str, int]:
    """A Ref as the row of a REF_TYPE column."""
    return {"partition": ref.partition, "offset": ref.offset}


def ref_from_row(row: Mapping[str, Any]) -> Ref:
    """The inverse; a null inside is an InvalidMessageError."""
    require(row["partition"] is not None and row["offset"] is not None, "ref", "null inside ref")
    return Ref(row["partition"], row["offset"])


def _to_row(s: Score) -> dict[str, Any]:
    return {name: getattr(s, name) for name in SCORE_SCHEMA.names} | {
        "split": s.split.value,
        "status": s.status.value,
        "ref": ref_to_row(s.ref),
        "stamps": stamps_to_row(s.stamps),
    }


def _from_row(row: Mapping[str, Any]) -> Score:
    return Score(
        **{
            **row,
            "split": member(Split, row["split"], "split"),
            "status": member(ScoreStatus, row["status"], "status"),
            "turn_rewards": None if row["turn_rewards"] is None else tuple(row["turn_rewards"].tolist()),
            "ref": ref_from_row(row["ref"]),
            "stamps": stamps_from_row(row["stamps"]),
        }
    )


SCORE: RecordType[Score] = RecordType(
    name="score", major=1, schema=SCORE_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_score
)
