"""What the work on one sample costs without Faust and without a broker: the bound that a worker cannot beat.

verify: decode the trajectory, score it, encode the score. advantage: decode the score, close the group, encode
the sample. Each hop moves one record in and one out besides, which is what the pass-through does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ...schemas.codec import Headers
from ...schemas.config import AdvantageConfig, StalenessConfig, VerifyConfig
from ...schemas.sample import SAMPLE, sample_headers
from ...schemas.score import SCORE, Ref
from ...schemas.trajectory import TRAJECTORY
from ...streams.fates import FateRule, fates_of
from ...streams.groups import GroupBook
from ...streams.rewards.base import view_of
from ...streams.rewards.runner import RewardRunner
from ...streams.verdicts import RewardBook, outcome_of, score_of
from ...streams.verify import score_headers
from . import thin

GROUP = 8
HOPS = 2


def work_us(
    *, tokens: int, groups: int = 100, trials: int = 5, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Microseconds of one core per sample, for each half of the work: the best of a few trials."""
    inputs = list(thin.records(0, groups * GROUP, group_size=GROUP, tokens=tokens, policy_id="bench"))
    best = [float("inf")] * 2
    for _ in range(trials):
        started = clock()
        scores = [_verify(value, headers, n) for n, (_, value, headers) in enumerate(inputs)]
        middle = clock()
        samples = _advantage(scores)
        spent = (middle - started, clock() - middle)
        assert samples == len(inputs)
        best = [min(b, s / len(inputs)) for b, s in zip(best, spent, strict=True)]
    return {"verify_us": round(best[0] * 1e6, 1), "advantage_us": round(best[1] * 1e6, 1)}


def bound(work: dict[str, float], passthrough_per_s: float) -> dict[str, Any]:
    """Samples per second if a worker did nothing but the work and move its records, and the ratio that gives."""
    seconds = sum(work.values()) / 1e6 + HOPS / passthrough_per_s
    return {
        **work,
        "bound_per_s": round(1 / seconds, 1),
        "bound_ratio": round(1 / seconds / passthrough_per_s, 3),
    }


_BOOK = RewardBook(VerifyConfig(reward="calculator"))
_RUNNER = RewardRunner(concurrency=1, timeout_s=1.0)
_RULE = FateRule.of(AdvantageConfig(), StalenessConfig())


def _verify(value: bytes, headers: Headers, offset: int) -> tuple[bytes, Headers]:
    trajectory = TRAJECTORY.decode(value, headers)
    reward, args = _BOOK.find(trajectory)
    outcome = outcome_of(_RUNNER.run_inline(reward, view_of(trajectory, args)), 0.0)
    score = score_of(trajectory, outcome, Ref(0, offset), 1)
    return SCORE.encode(score), score_headers(score, headers)


def _advantage(scores: list[tuple[bytes, Headers]]) -> int:
    book: GroupBook[None] = GroupBook()
    sent = 0
    for offset, (value, headers) in enumerate(scores):
        score = SCORE.decode(value, headers)
        _, closed = book.add(score, offset=offset, at_ms=1, handle=None)
        for group in closed:
            for sample in fates_of(group, _RULE, lambda _: 0, 1):
                sent += len(SAMPLE.encode(sample)) > 0 and bool(sample_headers(sample))
    return sent
