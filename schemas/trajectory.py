"""`trajectory/1`: one training row, token-exact: what was in the context, what was sampled, by which weights.

Invariants, checked on write and on read: the three token columns have one length; the mask is true exactly
where the version spans tile; a masked position has a finite log-probability <= 0, every other one 0.0; turns
are ordered, disjoint and cover exactly the sampled tokens; ids lie inside the vocabulary when it is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from .codec import RecordType, member, require
from .errors import InvalidMessageError


class Split(StrEnum):
    """What a task's rollouts are for."""

    TRAIN = "train"
    EVAL = "eval"


class TrajectoryStatus(StrEnum):
    """How the attempt ended, as its producer saw it."""

    COMPLETED = "completed"
    """The episode ran to its end (the policy's own end, a length limit, or the environment's)."""
    ABORTED = "aborted"
    """The infrastructure failed. A terminal marker of its group: void, never a reward of 0. May hold no tokens."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Token positions [start, end) that were sampled under one policy version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One engine call: its sampled tokens are positions [start, end)."""

    start: int
    end: int
    finish_reason: str
    """`stop`, `length` or `abort`."""
    tool_calls: str | None = None
    """JSON list of the calls parsed from this turn, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens were drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    max_tokens: int = 0
    """Limit of one turn."""
    logprobs_mode: str = "processed"
    """`processed`: of the distribution that was sampled from; `raw`: before temperature and truncation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One token sequence of one rollout."""

    trajectory_id: str
    rollout_id: str
    trajectory_index: int = 0
    """0-based, among the trajectories of its rollout (branches, sub-agents)."""
    trajectory_count: int = 1
    """How many trajectories the rollout has."""
    group_id: str
    group_size: int
    """Number of rollouts in the group; 1 for production traffic."""
    group_deadline_ms: int
    """Unix milliseconds of the broker's clock after which the group closes without its missing members."""
    task_id: str
    policy_id: str
    engine_id: str = ""
    session_id: str | None = None
    split: Split = Split.TRAIN
    status: TrajectoryStatus = TrajectoryStatus.COMPLETED
    reason: str | None = None
    """Why it was aborted."""
    token_ids: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] bool; true exactly on sampled tokens."""
    logprobs: np.ndarray
    """[T] float32, under the sampling policy; 0.0 where loss_mask is false."""
    version_spans: tuple[VersionSpan, ...]
    """Tile the sampled tokens in order; a span never crosses a masked-out token."""
    turns: tuple[Turn, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stop_reason: str = "stop"
    """Of the last turn: `stop`, `length`, `abort`, or the environment's word."""
    vocab_size: int | None = None
    reward_spec: str | None = None
    """JSON {"name": ..., "args": {...}}: how verify scores it; None: the configured default."""
    messages: str | None = None
    """JSON list of {role, content}: the episode as text, for rewards and for people."""
    routed_experts_ref: str | None = None
    """Blob URI of the expert ids per token and layer (mixture-of-experts replay)."""
    stamps: tuple[tuple[str, int], ...] = ()
    """(hop, Unix milliseconds) in the order in which the record passed."""
    metadata: str | None = None
    """Free-form JSON."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the loss may use."""
        return int(self.loss_mask.sum())

    @property
    def version_min(self) -> int:
        """Oldest policy version among the sampled tokens; -1 if there are none."""
        return min((s.version for s in self.version_spans), default=-1)

    @property
    def version_max(self) -> int:
        """Newest policy version among the sampled tokens; -1 if there are none."""
        return max((s.version for s in self.version_spans), default=-1)

    @property
    def truncated(self) -> bool:
        """True when the last turn ran into a length limit."""
        return self.stop_reason == "length"


def check_trajectory(t: Trajectory) -> None:
    """Raise InvalidMessageError where a trajectory breaks an invariant."""
    n = len(t.token_ids)
    if not (len(t.loss_mask) == n and len(t.logprobs) == n):
        lengths = f"{n} token_ids, {len(t.loss_mask)} loss_mask, {len(t.logprobs)} logprobs"
        raise InvalidMessageError("length_mismatch", lengths)
    require(bool(t.trajectory_id and t.rollout_id and t.group_id), "missing_id", "an id is empty")
    if t.group_size < 1:
        raise InvalidMessageError("group_size", f"{t.group_size}")
    if not 0 <= t.trajectory_index < t.trajectory_count:
        raise InvalidMessageError("trajectory_index", f"{t.trajectory_index} of {t.trajectory_count}")
    sampled = np.asarray(t.loss_mask, bool).tobytes()
    count = sampled.count(1)  # of a bytes object: a tenth of the time of a numpy reduction
    if t.status is TrajectoryStatus.COMPLETED:
        require(n > 0, "empty", "a completed trajectory without tokens")
        require(count > 0, "nothing_sampled", "no token was sampled")
    if n:
        _check_ids(t)
        _check_logprobs(t)
    _check_tiling("version_spans", [(s.start, s.end) for s in t.version_spans], sampled, count)
    _check_tiling("turns", [(s.start, s.end) for s in t.turns], sampled, count)
    for s in t.version_spans:
        if s.version < 0:
            raise InvalidMessageError("version_spans", "negative version")


def _check_ids(t: Trajectory) -> None:
    low, high = np.minimum.reduce(t.token_ids), np.maximum.reduce(t.token_ids)
    if low < 0:
        raise InvalidMessageError("token_out_of_range", f"id {low}")
    if t.vocab_size is not None and high >= t.vocab_size:
        raise InvalidMessageError("token_out_of_range", f"id {high}, vocabulary {t.vocab_size}")


def _check_logprobs(t: Trajectory) -> None:
    unmasked = t.logprobs[~t.loss_mask]
    require(not np.logical_or.reduce(unmasked), "logprob_unmasked", "a logprob outside the mask is not 0.0")
    # The rest is 0.0, so the extremes of the whole are those of the sampled tokens; a NaN is both of them.
    low, high = np.minimum.reduce(t.logprobs), np.maximum.reduce(t.logprobs)
    require(
        math.isfinite(low) and math.isfinite(high),
        "logprob_not_finite",
        "a sampled token's logprob is not finite",
    )
    require(high <= 0.0, "logprob_positive", "a sampled token's logprob is above 0")


def _check_tiling(what: str, spans: Sequence[tuple[int, int]], sampled: bytes, count: int) -> None:
    """`sampled`: one byte a token, 1 where it was sampled; `count` of them are."""
    position = covered = 0
    for start, end in spans:
        if not position <= start < end <= len(sampled):
            raise InvalidMessageError(what, f"[{start}, {end}) after {position} of {len(sampled)}")
        covered += sampled.count(1, start, end)
        position = end
    if not (covered == count == sum([end - start for start, end in spans])):
        raise InvalidMessageError(what, f"{what} do not tile the sampled tokens")


SPAN_TYPE = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
TURN_TYPE = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("finish_reason", pa.string()), ("tool_calls", pa.string())]
)
SAMPLING_TYPE = pa.struct(
    [
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int32()),
        ("max_tokens", pa.int32()),
        ("logprobs_mode", pa.string()),
    ]
)
STAMPS_TYPE = pa.list_(pa.struct([("hop", pa.string()), ("at_ms", pa.int64())]))

TRAJECTORY_SCHEMA = pa.schema(
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
        pa.field("engine_id", pa.string(), nullable=False),
        pa.field("session_id", pa.string()),
        pa.field("split", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("version_spans", pa.list_(SPAN_TYPE), nullable=False),
        pa.field("turns", pa.list_(TURN_TYPE), nullable=False),
        pa.field("sampling", SAMPLING_TYPE, nullable=False),
        pa.field("stop_reason", pa.string(), nullable=False),
        pa.field("vocab_size", pa.int32()),
        pa.field("reward_spec", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("routed_experts_ref", pa.string()),
        pa.field("stamps", STAMPS_TYPE, nullable=False),
        pa.field("metadata", pa.string()),
    ]
)


def stamps_to_row(stamps: tuple[tuple[str, int], ...]) -> list[dict[str, Any]]:
    """Stamps as the rows of a STAMPS_TYPE column."""
    return [{"hop": hop, "at_ms": at} for hop, at in stamps]


def stamps_from_row(value: list[dict[str, Any]] | None) -> tuple[tuple[str, int], ...]:
    """The inverse; a stamp without hop or time is an InvalidMessageError."""
    stamps = []
    for s in value or ():
        if s is None or None in s.values():
            raise InvalidMessageError("stamps", "null in a stamp")
        stamps.append((s["hop"], s["at_ms"]))
    return tuple(stamps)


def _to_row(t: Trajectory) -> dict[str, Any]:
    return {
        **{name: getattr(t, name) for name in _PLAIN},
        "split": t.split.value,
        "status": t.status.value,
        "version_spans": [{"version": s.version, "start": s.start, "end": s.end} for s in t.version_spans],
        "turns": [
            {"start": u.start, "end": u.end, "finish_reason": u.finish_reason, "tool_calls": u.tool_calls}
            for u in t.turns
        ],
        "sampling": {
            "temperature": t.sampling.temperature,
            "top_p": t.sampling.top_p,
            "top_k": t.sampling.top_k,
            "max_tokens": t.sampling.max_tokens,
            "logprobs_mode": t.sampling.logprobs_mode,
        },
        "stamps": stamps_to_row(t.stamps),
    }


def _span_from_row(row: Mapping[str, Any] | None) -> VersionSpan:
    if row is None or None in row.values():
        raise InvalidMessageError("unexpected_null", "null inside version_spans")
    return VersionSpan(**row)


def _turn_from_row(row: Mapping[str, Any] | None) -> Turn:
    if row is None or row["start"] is None or row["end"] is None or row["finish_reason"] is None:
        raise InvalidMessageError("unexpected_null", "null inside turns")
    return Turn(**row)


def _from_row(row: Mapping[str, Any]) -> Trajectory:
    sampling = row["sampling"]
    require(None not in sampling.values(), "unexpected_null", "null inside sampling")
    t = object.__new__(Trajectory)  # a frozen __init__ of 28 fields takes a sixth of the whole decoding
    fields = t.__dict__
    fields.update(row)
    fields["split"] = member(Split, row["split"], "split")
    fields["status"] = member(TrajectoryStatus, row["status"], "status")
    fields["version_spans"] = tuple([_span_from_row(s) for s in row["version_spans"]])
    fields["turns"] = tuple([_turn_from_row(u) for u in row["turns"]])
    fields["sampling"] = Sampling(**sampling)
    fields["stamps"] = stamps_from_row(row["stamps"])
    return t


_STRUCTURED = {"split", "status", "version_spans", "turns", "sampling", "stamps"}
_PLAIN = tuple(name for name in TRAJECTORY_SCHEMA.names if name not in _STRUCTURED)

TRAJECTORY: RecordType[Trajectory] = RecordType(
    name="trajectory",
    major=1,
    schema=TRAJECTORY_SCHEMA,
    to_row=_to_row,
    from_row=_from_row,
    check=check_trajectory,
)
