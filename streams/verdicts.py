"""From a trajectory to its score: which reward function, what it found, and the three outcomes.

scored: a finite number. failed: the policy failed by the reward's own rule, and gets the configured failure
reward. void: the infrastructure failed (the attempt was aborted, the reward function broke); not trained, not
in the baseline, and still a terminal marker of its group.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..schemas.config import VerifyConfig
from ..schemas.errors import ConfigError, InvalidMessageError, RewardError
from ..schemas.score import Ref, Score, ScoreStatus
from ..schemas.trajectory import Trajectory, TrajectoryStatus
from .rewards.base import RewardResult
from .rewards.composed import COMPOSED
from .rewards.load import LoadedReward, load_reward

HOP = "verify"
MAX_GROUP_MS = 24 * 3_600_000
"""A group that stays open longer would hold back the commits of its partition."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the verifier found."""

    status: ScoreStatus
    reward: float | None = None
    reason: str | None = None
    components: Mapping[str, float] | None = None
    turn_rewards: tuple[float, ...] | None = None

    @classmethod
    def void(cls, reason: str) -> Outcome:
        """The infrastructure failed."""
        return cls(ScoreStatus.VOID, reason=reason)


def outcome_of(result: RewardResult, failure_reward: float, turns: int | None = None) -> Outcome:
    """A reward function's result as an outcome, of a trajectory of `turns` turns. RewardError `turns_mismatch`."""
    if result.failed is not None:
        return Outcome(ScoreStatus.FAILED, failure_reward, result.failed)
    if result.turns is not None and turns is not None and len(result.turns) != turns:
        raise RewardError(
            "turns_mismatch", f"{len(result.turns)} rewards per turn for a trajectory of {turns} turns"
        )
    return Outcome(
        ScoreStatus.SCORED, result.value, components=result.components or None, turn_rewards=result.turns
    )


def check_deadline(trajectory: Trajectory, appended_ms: int) -> None:
    """InvalidMessageError for a group deadline that no group may have."""
    if trajectory.group_deadline_ms - appended_ms > MAX_GROUP_MS:
        raise InvalidMessageError(
            "group_deadline", f"{trajectory.group_deadline_ms} is over 24 hours after {appended_ms}"
        )


class RewardBook:
    """Reward functions by the specs that trajectories carry, loaded once."""

    def __init__(self, config: VerifyConfig) -> None:
        """Raises ConfigError when the configured default cannot be loaded."""
        self._default_args: Mapping[str, Any] = config.reward_args
        self._default = load_reward(config.reward, config.reward_args)
        self._named = lru_cache(maxsize=1024)(_load)

    def find(self, trajectory: Trajectory) -> tuple[LoadedReward, Mapping[str, Any]]:
        """The trajectory's reward function and arguments. Raises RewardError `reward_spec` or `reward_unknown`."""
        if trajectory.reward_spec is None:
            return self._default, self._default_args
        try:
            spec = json.loads(trajectory.reward_spec)
            name, args = str(spec["name"]), spec.get("args") or {}
            if not isinstance(args, dict):
                raise TypeError("args is not an object")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise RewardError("reward_spec", f"{trajectory.reward_spec[:100]!r}: {e}") from None
        if name == self._default.name and self._default.inline:
            return self._default, args
        try:
            made_with_args = ":" in name or name == COMPOSED
            return self._named(name, json.dumps(args, sort_keys=True) if made_with_args else "{}"), args
        except ConfigError as e:
            raise RewardError("reward_unknown", str(e)) from None


def _load(name: str, args: str) -> LoadedReward:
    return load_reward(name, json.loads(args))


def void_of(trajectory: Trajectory) -> Outcome | None:
    """The outcome of an attempt that the infrastructure ended; None when there is something to score."""
    if trajectory.status is TrajectoryStatus.ABORTED:
        return Outcome.void("aborted")
    return None


def score_of(trajectory: Trajectory, outcome: Outcome, ref: Ref, now_ms: int) -> Score:
    """The score record of `trajectory`, which lies at `ref`."""
    return Score(
        trajectory_id=trajectory.trajectory_id,
        rollout_id=trajectory.rollout_id,
        trajectory_index=trajectory.trajectory_index,
        trajectory_count=trajectory.trajectory_count,
        group_id=trajectory.group_id,
        group_size=trajectory.group_size,
        group_deadline_ms=trajectory.group_deadline_ms,
        task_id=trajectory.task_id,
        policy_id=trajectory.policy_id,
        split=trajectory.split,
        status=outcome.status,
        reason=outcome.reason,
        reward=outcome.reward,
        components=json.dumps(dict(outcome.components)) if outcome.components else None,
        turn_rewards=outcome.turn_rewards,
        version_min=trajectory.version_min,
        version_max=trajectory.version_max,
        total_tokens=len(trajectory.token_ids),
        sampled_tokens=trajectory.sampled_tokens,
        truncated=trajectory.truncated,
        ref=ref,
        stamps=(*trajectory.stamps, (HOP, now_ms)),
    )
