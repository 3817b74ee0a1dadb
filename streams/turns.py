"""Advantages per turn, where the reward function gave one reward per turn.

The return of a turn is its reward-to-go, R_t = sum over k >= t of discount^(k - t) r_k; its advantage is the
estimator over the members' R_t at the same turn index: process supervision (Shao et al., arXiv 2402.03300,
section 4.1.3) with a baseline per turn. A member that has ended earns 0 from then on, and counts with that, so
members with different numbers of turns can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .estimators import Estimator


def rewards_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    """[turns] rewards -> [turns] returns."""
    found, total = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        total = rewards[t] + discount * total
        found[t] = total
    return found


def turn_advantages(
    members: Sequence[Sequence[float]], estimator: Estimator, discount: float
) -> list[np.ndarray]:
    """[G] members with [turns] rewards each -> [G] arrays of [turns] float64."""
    returns = [rewards_to_go(m, discount) for m in members]
    found = [np.zeros(len(m)) for m in members]
    for t in range(max(map(len, returns), default=0)):
        advantages = estimator([r[t] if t < len(r) else 0.0 for r in returns])
        for own, advantage in zip(found, advantages, strict=True):
            if t < len(own):
                own[t] = advantage
    return found
