"""Advantages from the rewards of one group: pure functions over its valid members, in order.

A constant group, and a lone member, give exactly 0.0: no learning signal, and no rounding noise in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Estimator = Callable[[Sequence[float]], list[float]]
"""[G] finite rewards -> [G] finite advantages."""

GRPO_EPSILON = 1e-4


def rloo(rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean of the others = G/(G-1) (r - mean) (Ahmadian et al., arXiv 2402.14740)."""
    g = len(rewards)
    return _centred(rewards, lambda deviations: g / (g - 1))


def grpo(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (sample standard deviation + 1e-4) (Shao et al., arXiv 2402.03300)."""

    def scale(deviations: Sequence[float]) -> float:
        variance = math.fsum(d * d for d in deviations) / (len(deviations) - 1)
        return 1.0 / (math.sqrt(variance) + GRPO_EPSILON)

    return _centred(rewards, scale)


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r - mean, without the division that favours easy and hard tasks (Liu et al., arXiv 2503.20783)."""
    return _centred(rewards, lambda deviations: 1.0)


def _centred(rewards: Sequence[float], scale: Callable[[Sequence[float]], float]) -> list[float]:
    if len(rewards) < 2 or all(r == rewards[0] for r in rewards):
        return [0.0] * len(rewards)
    mean = mean_of(rewards)
    deviations = [r - mean for r in rewards]
    factor = scale(deviations)
    return [factor * d for d in deviations]


def mean_of(rewards: Sequence[float]) -> float:
    """The baseline of a group of at least one member."""
    return math.fsum(rewards) / len(rewards)


ESTIMATORS: dict[str, Estimator] = {"rloo": rloo, "grpo": grpo, "dr_grpo": dr_grpo}
