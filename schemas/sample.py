"""`sample/1`: the fate of one scored trajectory: admitted to training with an advantage, or dropped and why.

Every score becomes exactly one sample record, admitted or not, so the log itself accounts for each rollout;
the trainer fetches the payload of admitted ones only. `fate`, `rollout` and `trajectory` also travel as headers,
so that a reader who only counts need not decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from .codec import Headers, RecordType, finite, member, require, version_headers
from .score import REF_TYPE, Ref, check_ref, ref_from_row, ref_to_row
from .trajectory import STAMPS_TYPE, Split, stamps_from_row, stamps_to_row

FATE_HEADER = "fate"
ROLLOUT_HEADER = "rollout"
TRAJECTORY_HEADER = "trajectory"


class Fate(StrEnum):
    """What became of a scored trajectory."""

    ADMITTED = "admitted"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One trajectory's fate and, when admitted, its advantage."""

    trajectory_id: str
    """Also the sample's identity: the trainer drops repeats by it."""
    rollout_id: str
    group_id: str
    task_id: str
    policy_id: str
    split: Split
    fate: Fate
    reason: str | None = None
    """Why it was dropped: `stale`, `void`, `eval`, `zero_variance`, `over_long`, `late`, ..."""
    reward: float | None = None
    advantage: float | None = None
    """Per trajectory; finite when admitted."""
    turn_advantages: np.ndarray | None = None
    """[turns] float64, where the reward is per turn."""
    group_valid: int = 0
    """Members whose reward entered the baseline."""
    group_mean: float | None = None
    version_min: int
    version_max: int
    total_tokens: int
    sampled_tokens: int
    truncated: bool
    ref: Ref
    stamps: tuple[tuple[str, int], ...] = ()


SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("policy_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("fate", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("turn_advantages", pa.list_(pa.float64())),
        pa.field("group_valid", pa.int32(), nullable=False),
        pa.field("group_mean", pa.float64()),
        pa.field("version_min", pa.int64(), nullable=False),
        pa.field("version_max", pa.int64(), nullable=False),
        pa.field("total_tokens", pa.int32(), nullable=False),
        pa.field("sampled_tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("ref", REF_TYPE, nullable=False),
        pa.field("stamps", STAMPS_TYPE, nullable=False),
    ]
)


def check_sample(s: Sample) -> None:
    """Raise InvalidMessageError where a sample breaks an invariant."""
    require(bool(s.trajectory_id and s.rollout_id and s.group_id), "missing_id", "an id is empty")
    require(finite(s.reward), "reward_not_finite", f"{s.reward}")
    if s.fate is Fate.ADMITTED:
        require(s.advantage is not None and finite(s.advantage), "advantage_not_finite", f"{s.advantage}")
        require(s.sampled_tokens > 0, "nothing_sampled", "an admitted sample without sampled tokens")
    else:
        require(bool(s.reason), "reason", "a dropped sample says why")
    if s.turn_advantages is not None:
        require(bool(np.isfinite(s.turn_advantages).all()), "advantage_not_finite", "turn_advantages")
    check_ref(s.ref)


def sample_headers(s: Sample) -> Headers:
    """The record headers of a sample."""
    return [
        *version_headers(SAMPLE.tag, s.policy_id, s.version_min, s.version_max),
        (FATE_HEADER, s.fate.value.encode()),
        (ROLLOUT_HEADER, s.rollout_id.encode()),
        (TRAJECTORY_HEADER, s.trajectory_id.encode()),
    ]


def _to_row(s: Sample) -> dict[str, Any]:
    return {name: getattr(s, name) for name in SAMPLE_SCHEMA.names} | {
        "split": s.split.value,
        "fate": s.fate.value,
        "ref": ref_to_row(s.ref),
        "stamps": stamps_to_row(s.stamps),
    }


def _from_row(row: Mapping[str, Any]) -> Sample:
    return Sample(
        **{
            **row,
            "split": member(Split, row["split"], "split"),
            "fate": member(Fate, row["fate"], "fate"),
            "ref": ref_from_row(row["ref"]),
            "stamps": stamps_from_row(row["stamps"]),
        }
    )


SAMPLE: RecordType[Sample] = RecordType(
    name="sample", major=1, schema=SAMPLE_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_sample
)
