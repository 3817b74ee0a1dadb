"""`composed`: the weighted sum of named components, each any reward with arguments of its own, each recorded.

    {"name": "composed", "args": {"parts": {"right": {"reward": "numeric", "weight": 0.9, "args": {"answer": 4}}, ...}}}

A component that failed counts as verify.failure_reward; one that is void makes the whole void, with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ...schemas.errors import RewardError
from .args import Args
from .base import RewardResult, RolloutView

COMPOSED = "composed"


class PartArgs(Args):
    """One component."""

    reward: str
    weight: float = 1.0
    args: Annotated[dict[str, Any], Field(default_factory=dict)]


class ComposedArgs(Args):
    """Of `composed`."""

    parts: Annotated[dict[str, PartArgs], Field(min_length=1, max_length=32)]


def combined(
    parts: Sequence[tuple[str, float]], found: Sequence[RewardResult | BaseException], failure_reward: float
) -> RewardResult:
    """The sum over (name, weight) of what each part found. Raises what the first broken part raised."""
    total, components = [], {}
    for (name, weight), result in zip(parts, found, strict=True):
        if isinstance(result, RewardError):
            raise RewardError(result.reason, f"part {name!r}: {result.detail}")
        if isinstance(result, BaseException):
            raise result
        value = failure_reward if result.failed is not None or result.value is None else result.value
        components[name] = value
        components.update({f"{name}.{inner}": v for inner, v in result.components.items()})
        total.append(weight * value)
    try:
        reward = math.fsum(total)
    except (OverflowError, ValueError):  # beyond a float on the way, or inf - inf
        reward = math.nan
    if not math.isfinite(reward):
        raise RewardError("reward_not_finite", f"the weighted sum is {reward}")
    return RewardResult(reward, components)


def not_called(rollout: RolloutView) -> float:
    """Of `composed` itself: its parts are called, wherever each must run."""
    raise RewardError("reward_unknown", "composed is run by its parts")
