"""What becomes of each member of a closed group: admitted to training with its advantage, or dropped and why.

Filters come after the advantage is computed, so that dropping one member never shifts the others. Each score
becomes exactly one sample, whatever its fate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..schemas.config import AdvantageConfig, StalenessConfig
from ..schemas.sample import Fate, Sample
from ..schemas.score import Score
from ..schemas.trajectory import Split
from .estimators import ESTIMATORS, Estimator, mean_of
from .gate import is_too_stale
from .groups import ClosedGroup

HOP = "advantage"


@dataclass(frozen=True, slots=True)
class FateRule:
    """How advantages are computed and what is filtered."""

    estimator: Estimator
    drop_zero_variance: bool
    drop_truncated: bool
    max_lag: int

    @classmethod
    def of(cls, advantage: AdvantageConfig, staleness: StalenessConfig) -> FateRule:
        """The rule that the configuration asks for."""
        return cls(
            ESTIMATORS[advantage.estimator],
            advantage.drop_zero_variance,
            advantage.drop_truncated,
            staleness.max_lag,
        )


@dataclass(frozen=True, slots=True)
class _Baseline:
    valid: int = 0
    mean: float | None = None
    constant: bool = False


def fates_of(
    group: ClosedGroup[Any], rule: FateRule, current_version: Callable[[str], int | None], now_ms: int
) -> list[Sample]:
    """One sample per record of the group, in the order of its rollouts.

    `current_version(policy_id)` is the newest version published, None while there is none.
    """
    rewards = {r.rollout_id: r.reward for r in group.rollouts}
    valid = {name: reward for name, reward in rewards.items() if reward is not None}
    advantages = dict(zip(valid, rule.estimator(list(valid.values())), strict=True))
    baseline = _Baseline(
        len(valid), mean_of(list(valid.values())) if valid else None, len(set(valid.values())) == 1
    )
    samples = []
    for rollout in group.rollouts:
        for entry in rollout.entries:
            score, advantage = entry.score, advantages.get(rollout.rollout_id)
            reason = None if rollout.whole else "late"
            if reason is None:
                reason = _reason(score, advantage, baseline, rule, current_version)
            samples.append(_sample(score, reason, rollout.reward, advantage, baseline, now_ms))
    return samples


def late_fate(score: Score, now_ms: int) -> Sample:
    """The sample of a score whose group is closed."""
    return _sample(score, "late", score.reward, None, _Baseline(), now_ms)


def _reason(
    score: Score,
    advantage: float | None,
    baseline: _Baseline,
    rule: FateRule,
    current_version: Callable[[str], int | None],
) -> str | None:
    """Why the score's trajectory is not trained; None when it is."""
    if advantage is None:
        return "void"
    if score.split is Split.EVAL:
        return "eval"
    if rule.drop_zero_variance and baseline.constant:
        return "zero_variance"
    if rule.drop_truncated and score.truncated:
        return "truncated"
    if is_too_stale(score, current_version(score.policy_id), rule.max_lag):
        return "stale"
    return None


def _sample(
    score: Score,
    reason: str | None,
    reward: float | None,
    advantage: float | None,
    baseline: _Baseline,
    now_ms: int,
) -> Sample:
    return Sample(
        trajectory_id=score.trajectory_id,
        rollout_id=score.rollout_id,
        group_id=score.group_id,
        task_id=score.task_id,
        policy_id=score.policy_id,
        split=score.split,
        fate=Fate.ADMITTED if reason is None else Fate.DROPPED,
        reason=reason,
        reward=reward,
        advantage=advantage,
        group_valid=baseline.valid,
        group_mean=baseline.mean,
        version_min=score.version_min,
        version_max=score.version_max,
        total_tokens=score.total_tokens,
        sampled_tokens=score.sampled_tokens,
        truncated=score.truncated,
        ref=score.ref,
        stamps=(*score.stamps, (HOP, now_ms)),
    )
