"""One full and one sparse example of every record type, for tests of the codec."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from headrace.schemas.codec import RecordType
from headrace.schemas.engine import ENGINE, EngineState, EngineStatus
from headrace.schemas.feedback import FEEDBACK, Feedback
from headrace.schemas.sample import SAMPLE, Fate, Sample
from headrace.schemas.score import SCORE, Ref, Score, ScoreStatus
from headrace.schemas.task import TASK, Task
from headrace.schemas.trajectory import (
    TRAJECTORY,
    Sampling,
    Split,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
)
from headrace.schemas.weights import WEIGHTS, BlobKind, WeightBlob, WeightRecord

TYPES: dict[str, RecordType[Any]] = {
    r.name: r for r in (TASK, TRAJECTORY, SCORE, SAMPLE, FEEDBACK, WEIGHTS, ENGINE)
}

_IDS = {"rollout_id": "r", "group_id": "g", "task_id": "t", "policy_id": "p"}
_THIN = {
    "trajectory_id": "r-0",
    **_IDS,
    "split": Split.TRAIN,
    "version_min": 3,
    "version_max": 4,
    "total_tokens": 9,
    "sampled_tokens": 5,
    "truncated": False,
    "ref": Ref(2, 77),
}
_STAMPS = (("rollout_start", 1_700_000_000_000), ("rollout_end", 1_700_000_000_250))

TRAJECTORY_FULL = Trajectory(
    trajectory_id="r-0",
    **_IDS,
    trajectory_index=1,
    trajectory_count=2,
    group_size=4,
    group_deadline_ms=1_700_000_120_000,
    engine_id="engine-0",
    session_id="s",
    token_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32),
    loss_mask=np.array([0, 0, 1, 1, 1, 0, 0, 1, 1], bool),
    logprobs=np.array([0, 0, -0.5, -1.0, -0.25, 0, 0, -2.0, 0.0], np.float32),
    version_spans=(VersionSpan(3, 2, 4), VersionSpan(4, 4, 5), VersionSpan(4, 7, 9)),
    turns=(
        Turn(start=2, end=5, finish_reason="stop", tool_calls='[{"name": "f"}]'),
        Turn(start=7, end=9, finish_reason="length"),
    ),
    sampling=Sampling(temperature=0.7, top_p=0.9, top_k=50, max_tokens=64, logprobs_mode="raw"),
    stop_reason="length",
    vocab_size=17,
    reward_spec='{"name": "exact_match"}',
    messages='[{"role": "user", "content": "\\u00e9"}]',
    routed_experts_ref="experts/r-0",
    stamps=_STAMPS,
    metadata="{}",
)
TRAJECTORY_EMPTY = dataclasses.replace(
    TRAJECTORY_FULL,
    trajectory_index=0,
    trajectory_count=1,
    status=TrajectoryStatus.ABORTED,
    reason="engine",
    token_ids=np.empty(0, np.int32),
    loss_mask=np.empty(0, bool),
    logprobs=np.empty(0, np.float32),
    version_spans=(),
    turns=(),
    stop_reason="abort",
    **dict.fromkeys(
        ("session_id", "vocab_size", "reward_spec", "messages", "routed_experts_ref", "metadata")
    ),
    stamps=(),
)
SCORE_FULL = Score(
    **_THIN,
    trajectory_index=0,
    trajectory_count=1,
    group_size=4,
    group_deadline_ms=1_700_000_120_000,
    status=ScoreStatus.SCORED,
    reward=0.75,
    components='{"format": 0.25, "answer": 0.5}',
    stamps=_STAMPS,
)
SCORE_VOID = dataclasses.replace(
    SCORE_FULL, status=ScoreStatus.VOID, reason="engine", reward=None, components=None, stamps=()
)
SCORE_TURNS = dataclasses.replace(SCORE_FULL, turn_rewards=(0.5, 0.25))
SAMPLE_FULL = Sample(
    **_THIN,
    fate=Fate.ADMITTED,
    reward=0.75,
    advantage=-0.125,
    turn_advantages=np.array([0.5, -0.625]),
    group_valid=3,
    group_mean=0.5,
    stamps=_STAMPS,
)
SAMPLE_DROPPED = dataclasses.replace(
    SAMPLE_FULL,
    fate=Fate.DROPPED,
    reason="stale",
    reward=None,
    advantage=None,
    turn_advantages=None,
    group_mean=None,
    stamps=(),
)
_BLOB = WeightBlob(kind=BlobKind.DELTA, uri="weights/p/8.delta", size=1234, sha256="ab" * 32)
WEIGHTS_FULL = WeightRecord(
    policy_id="p",
    version=8,
    base_version=7,
    base_hash=2**64 - 1,
    weights_hash=2**63 + 5,
    blobs=(
        _BLOB,
        dataclasses.replace(_BLOB, kind=BlobKind.ANCHOR, uri="weights/p/8.anchor.0", shard=0, shards=2),
        dataclasses.replace(_BLOB, kind=BlobKind.ANCHOR, uri="weights/p/8.anchor.1", shard=1, shards=2),
    ),
    samples=(Ref(0, 5), Ref(3, 2)),
    consumed=((0, 6), (3, 3)),
    dropped={"stale": 2},
    changed_elements=10,
    total_elements=100,
    full_bytes=200,
    metrics={"reward_mean": 0.5, "lag_max": 1},
    config_hash="c0ffee",
    created_ms=1_700_000_000_000,
)
WEIGHTS_FIRST = WeightRecord(
    policy_id="p",
    version=0,
    base_version=None,
    base_hash=None,
    weights_hash=0,
    blobs=(dataclasses.replace(_BLOB, kind=BlobKind.ANCHOR),),
)
TASK_RAW = Task(task_id="t", policy_id="p", prompt="47+38=")
TASK_CHAT = Task(
    task_id="t",
    policy_id="p",
    split=Split.EVAL,
    messages='[{"role": "user", "content": "hi"}]',
    environment="my.module:Env",
    environment_args='{"a": 1}',
    reward_spec='{"name": "sum"}',
    group_size=8,
    max_tokens=64,
    metadata="{}",
)
FEEDBACK_FULL = Feedback(
    feedback_id="f", rollout_id="r", name="accepted", value=1.0, event_ms=1_700_000_000_000, metadata="{}"
)
ENGINE_FULL = EngineStatus(
    engine_id="engine-0",
    policy_id="p",
    state=EngineState.APPLYING,
    version=7,
    weights_hash=2**64 - 2,
    latest_version=8,
    updates=7,
    pause_ms=3.5,
    apply_ms=1.25,
    stage_ms=20.0,
    running=12,
    generated_tokens=34567,
    url="http://127.0.0.1:4711",
    reason="gap",
    at_ms=1_700_000_000_000,
    paused=True,
    held=False,
)

EXAMPLES: dict[str, tuple[str, Any]] = {
    "trajectory": ("trajectory", TRAJECTORY_FULL),
    "trajectory_empty": ("trajectory", TRAJECTORY_EMPTY),
    "score": ("score", SCORE_FULL),
    "score_void": ("score", SCORE_VOID),
    "score_turns": ("score", SCORE_TURNS),
    "sample": ("sample", SAMPLE_FULL),
    "sample_dropped": ("sample", SAMPLE_DROPPED),
    "weights": ("weights", WEIGHTS_FULL),
    "weights_first": ("weights", WEIGHTS_FIRST),
    "task": ("task", TASK_RAW),
    "task_chat": ("task", TASK_CHAT),
    "feedback": ("feedback", FEEDBACK_FULL),
    "feedback_bare": ("feedback", dataclasses.replace(FEEDBACK_FULL, metadata=None)),
    "engine": ("engine", ENGINE_FULL),
    "engine_new": (
        "engine",
        EngineStatus(engine_id="engine-0", policy_id="p", state=EngineState.IDLE, version=-1),
    ),
}
"""Name -> (record type, record)."""


def plain(record: Any) -> dict[str, Any]:
    """A record as comparable values: arrays as (dtype, list)."""
    fields = (f.name for f in dataclasses.fields(record))
    values = {name: getattr(record, name) for name in fields}
    return {k: (str(v.dtype), v.tolist()) if isinstance(v, np.ndarray) else v for k, v in values.items()}
