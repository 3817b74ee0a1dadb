"""Records and readers for the tests of the stream processors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace.schemas.codec import version_headers
from headrace.schemas.config import KafkaConfig
from headrace.schemas.score import Ref, Score, ScoreStatus
from headrace.schemas.trajectory import TRAJECTORY, Sampling, Split, Trajectory, Turn, VersionSpan
from headrace.streams.kafka import closing, make_consumer, partitions_of

FAR_MS = 600_000


def a_trajectory(
    name: str, *, group: str = "g", size: int = 1, answer: str = "85$", **other: Any
) -> Trajectory:
    """The calculator's episode `47+38=` `[47+38]` `85>` `85$`, one token per character."""
    texts = [("user", "47+38="), ("assistant", "[47+38]"), ("tool", "85>"), ("assistant", answer)]
    roles = [role for role, text in texts for _ in text]
    mask = np.array([role == "assistant" for role in roles])
    spans = [(6, 13), (16, 16 + len(answer))]
    fields: dict[str, Any] = {
        "trajectory_id": f"{name}.0",
        "rollout_id": name,
        "group_id": group,
        "group_size": size,
        "group_deadline_ms": int(time.time() * 1000) + FAR_MS,
        "task_id": "t",
        "policy_id": "policy",
        "token_ids": np.arange(len(roles), dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, np.float32(-0.5), np.float32(0.0)),
        "version_spans": tuple(VersionSpan(0, *s) for s in spans),
        "turns": tuple(Turn(start=a, end=b, finish_reason="stop") for a, b in spans),
        "sampling": Sampling(max_tokens=16),
        "messages": json.dumps([{"role": r, "content": t} for r, t in texts]),
        "reward_spec": json.dumps({"name": "calculator", "args": {}}),
    }
    return Trajectory(**{**fields, **other})


def trajectory_headers(t: Trajectory) -> list[tuple[str, bytes]]:
    """What a producer of trajectories sends along."""
    return version_headers(TRAJECTORY.tag, t.policy_id, t.version_min, t.version_max)


def a_score(
    rollout: str, reward: float | None = 1.0, *, group: str = "g", size: int = 4, **other: Any
) -> Score:
    """A score; without a reward a void one."""
    fields: dict[str, Any] = {
        "trajectory_id": f"{rollout}.{other.get('trajectory_index', 0)}",
        "rollout_id": rollout,
        "trajectory_index": 0,
        "trajectory_count": 1,
        "group_id": group,
        "group_size": size,
        "group_deadline_ms": 10_000,
        "task_id": "t",
        "policy_id": "policy",
        "split": Split.TRAIN,
        "status": ScoreStatus.VOID if reward is None else ScoreStatus.SCORED,
        "reason": "aborted" if reward is None else None,
        "reward": reward,
        "version_min": 0,
        "version_max": 0,
        "total_tokens": 10,
        "sampled_tokens": 4,
        "truncated": False,
        "ref": Ref(0, 0),
    }
    return Score(**{**fields, **other})


def records_of(config: KafkaConfig, topic: str, *, timeout_s: float) -> Iterator[Any]:
    """The records of `topic` from the beginning, as they come, for at most `timeout_s`."""
    until = time.monotonic() + timeout_s
    with closing(make_consumer(config, client_id="test")) as consumer:
        tps = partitions_of(consumer, topic)
        consumer.assign(tps)
        consumer.seek_to_beginning(*tps)
        while time.monotonic() < until:
            for batch in consumer.poll(timeout_ms=100).values():
                yield from batch


def take(config: KafkaConfig, topic: str, count: int, *, timeout_s: float = 60.0) -> list[Any]:
    """The first `count` records of `topic`; fewer only when they do not come in time."""
    found = []
    for record in records_of(config, topic, timeout_s=timeout_s):
        found.append(record)
        if len(found) == count:
            break
    return found
