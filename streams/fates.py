"""What becomes of each member of a closed group: admitted to training with its advantage, or dropped and why.

Filters come after the advantage is computed, so that dropping one member never shifts the others. Each score
becomes exactly one sample, whatever its fate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schemas.config import AdvantageConfig, StalenessConfig
from ..schemas.sample import Fate, Sample
from ..schemas.score import Score
from ..schemas.trajectory import Split
from .estimators import WITH_HISTORY, Estimator, estimator_of, mean_of
from .gate import is_too_stale
from .groups import ClosedGroup, Rollout
from .turns import turn_advantages

HOP = "advantage"
OVERFLOW = "advantage_not_finite"
"""Why a group is dropped whose finite rewards are too large to reckon with: it must not stop the partition."""


@dataclass(frozen=True, slots=True)
class FateRule:
    """How advantages are computed and what is filtered."""

    estimator: Estimator
    drop_zero_variance: bool
    drop_truncated: bool
    max_lag: int
    max_tokens: int | None
    counts_sampled: bool
    """max_tokens is about the sampled tokens."""
    turn_discount: float
    window: int
    """Rewards before the group that the estimator looks at; 0: none."""

    @classmethod
    def of(cls, advantage: AdvantageConfig, staleness: StalenessConfig) -> FateRule:
        """The rule that the configuration asks for."""
        return cls(
            estimator_of(advantage.estimator, ema_decay=advantage.ema_decay),
            advantage.drop_zero_variance,
            advantage.drop_truncated,
            staleness.max_lag,
            advantage.max_tokens,
            advantage.max_tokens_of == "sampled",
            advantage.turn_discount,
            advantage.window if advantage.estimator in WITH_HISTORY else 0,
        )


@dataclass(frozen=True, slots=True)
class _Baseline:
    valid: int = 0
    mean: float | None = None
    silent: bool = False
    """Every advantage is 0."""


def fates_of(
    group: ClosedGroup[Any],
    rule: FateRule,
    current_version: Callable[[str], int | None],
    now_ms: int,
    history: Sequence[float] = (),
) -> list[Sample]:
    """One sample per record of the group, in the order of its rollouts.

    `current_version(policy_id)` is the newest version published, None while there is none; `history` is what
    Baselines gives for the group. Rollouts of the eval split enter no baseline but that of a group of their own.
    """
    valid = [r for r in group.rollouts if r.reward is not None]
    counted = [r for r in valid if not _is_eval(r)] or valid
    advantages, by_turn, baseline = _weighed(counted, rule, history)
    samples = []
    for rollout in group.rollouts:
        advantage, turns = advantages.get(rollout.rollout_id), by_turn.get(rollout.rollout_id)
        for entry in rollout.entries:
            reason = None if rollout.whole else "late"
            if reason is None:
                reason = _reason(entry.score, rollout.reward, baseline, rule, current_version)
            if reason is None and advantage is None:
                reason = "eval" if advantages else OVERFLOW
            samples.append(_sample(entry.score, reason, rollout.reward, advantage, baseline, now_ms, turns))
    return samples


def _weighed(
    counted: Sequence[Rollout[Any]], rule: FateRule, history: Sequence[float]
) -> tuple[dict[str, float], Mapping[str, np.ndarray], _Baseline]:
    """Advantages by rollout, those per turn, and the baseline; nothing where rewards overflow the arithmetic."""
    rewards = [r.reward for r in counted if r.reward is not None]
    try:
        found = rule.estimator(rewards, history)
        by_turn = _by_turn(counted, rule)
        mean = mean_of(rewards) if rewards else None
    except (OverflowError, ValueError):  # fsum says ValueError of inf - inf
        return {}, {}, _Baseline(len(counted))
    if not all(map(math.isfinite, found)) or not all(np.isfinite(a).all() for a in by_turn.values()):
        return {}, {}, _Baseline(len(counted))
    silent = not any(found) and not any(a.any() for a in by_turn.values())
    advantages = dict(zip((r.rollout_id for r in counted), found, strict=True))
    return advantages, by_turn, _Baseline(len(counted), mean, silent)


def _is_eval(rollout: Rollout[Any]) -> bool:
    return any(e.score.split is Split.EVAL for e in rollout.entries)


def _by_turn(rollouts: Sequence[Rollout[Any]], rule: FateRule) -> Mapping[str, np.ndarray]:
    """Advantages per turn where each rollout is one trajectory with a reward per turn; else none for all.

    A baseline over sums does not fit returns from the middle, so estimators with a history have none either.
    """
    turns = [r.entries[0].score.turn_rewards for r in rollouts if len(r.entries) == 1]
    members = [t for t in turns if t]
    if rule.window or len(members) != len(rollouts):
        return {}
    names = [r.rollout_id for r in rollouts]
    return dict(zip(names, turn_advantages(members, rule.estimator, rule.turn_discount), strict=True))


def late_fate(score: Score, now_ms: int) -> Sample:
    """The sample of a score whose group is closed."""
    return _sample(score, "late", score.reward, None, _Baseline(), now_ms)


def _reason(
    score: Score,
    reward: float | None,
    baseline: _Baseline,
    rule: FateRule,
    current_version: Callable[[str], int | None],
) -> str | None:
    """Why the score's trajectory is not trained; None when it is."""
    if reward is None:
        return "void"
    if score.split is Split.EVAL:
        return "eval"
    if rule.drop_zero_variance and baseline.silent:
        return "zero_variance"
    if rule.drop_truncated and score.truncated:
        return "truncated"
    tokens = score.sampled_tokens if rule.counts_sampled else score.total_tokens
    if rule.max_tokens is not None and tokens > rule.max_tokens:
        return "over_long"
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
    turns: np.ndarray | None = None,
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
        turn_advantages=turns,
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
