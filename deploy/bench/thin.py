"""Thin records for a throughput figure: rollouts of a few tokens, in groups, all alike but for their ids."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np

from ...schemas.codec import Headers, version_headers
from ...schemas.trajectory import TRAJECTORY, Sampling, Trajectory, Turn, VersionSpan

ANSWER = "85$"
DEADLINE_MS = 3_600_000


def trajectory(
    rollout: str, group: str, group_size: int, *, tokens: int, deadline_ms: int, policy_id: str
) -> Trajectory:
    """One finished rollout of `tokens` tokens, half of them sampled; the reward is `calculator`'s."""
    mask = np.arange(tokens) >= tokens // 2
    span = (tokens // 2, tokens)
    return Trajectory(
        trajectory_id=f"{rollout}.0",
        rollout_id=rollout,
        group_id=group,
        group_size=group_size,
        group_deadline_ms=deadline_ms,
        task_id="bench",
        policy_id=policy_id,
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0.0)),
        version_spans=(VersionSpan(0, *span),),
        turns=(Turn(start=span[0], end=span[1], finish_reason="stop"),),
        sampling=Sampling(max_tokens=tokens),
        messages=json.dumps(
            [{"role": "user", "content": "47+38="}, {"role": "assistant", "content": ANSWER}]
        ),
        reward_spec='{"name": "calculator", "args": {}}',
    )


def records(
    start: int, count: int, *, group_size: int, tokens: int, policy_id: str
) -> Iterator[tuple[bytes, bytes, Headers]]:
    """Key, value and headers of `count` trajectories from number `start` on, group after group."""
    deadline_ms = int(time.time() * 1000) + DEADLINE_MS
    for i in range(start, start + count):
        group = f"g{i // group_size}"
        t = trajectory(
            f"{group}-r{i % group_size}",
            group,
            group_size,
            tokens=tokens,
            deadline_ms=deadline_ms,
            policy_id=policy_id,
        )
        yield t.rollout_id.encode(), TRAJECTORY.encode(t), version_headers(TRAJECTORY.tag, policy_id, 0, 0)
