"""How fast one core decodes and validates trajectories."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ...schemas.codec import version_headers
from ...schemas.trajectory import TRAJECTORY, Trajectory, Turn, VersionSpan
from . import thin

TRIALS = 7


def sized(record_bytes: int) -> Trajectory:
    """A two-turn trajectory, sampled under two versions, whose record has about `record_bytes` bytes."""
    small = thin.trajectory("r", "g", 8, tokens=64, deadline_ms=1, policy_id="bench")
    overhead = len(TRAJECTORY.encode(small)) - 64 * 8
    tokens = max(64, int((record_bytes - overhead) / 8.125))
    a, b, c = tokens // 8, tokens // 2, tokens // 2 + tokens // 8
    mask = np.zeros(tokens, bool)
    mask[a:b] = mask[c:] = True
    return Trajectory(
        **{name: getattr(small, name) for name in ("trajectory_id", "rollout_id", "group_id", "group_size")},
        group_deadline_ms=1,
        task_id="bench",
        policy_id="bench",
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-0.5), np.float32(0.0)),
        version_spans=(
            VersionSpan(0, a, b),
            VersionSpan(0, c, tokens - 5),
            VersionSpan(1, tokens - 5, tokens),
        ),
        turns=tuple(Turn(start=x, end=y, finish_reason="stop") for x, y in ((a, b), (c, tokens))),
        messages=small.messages,
        reward_spec=small.reward_spec,
        vocab_size=tokens,
        stamps=(("rollout", 1),),
    )


def decode_mb_s(
    record_bytes: int = 16_384, *, calls: int = 500, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Megabytes (1e6) of records decoded and validated in a second of one core: the best of a few trials."""
    t = sized(record_bytes)
    value, headers = TRAJECTORY.encode(t), version_headers(TRAJECTORY.tag, "bench", 0, 1)
    best = float("inf")
    for _ in range(TRIALS):
        started = clock()
        for _ in range(calls):
            TRAJECTORY.decode(value, headers)
        best = min(best, (clock() - started) / calls)
    return {
        "decode_mb_s": round(len(value) / best / 1e6, 1),
        "decode_us": round(best * 1e6, 1),
        "decode_record_bytes": len(value),
    }
