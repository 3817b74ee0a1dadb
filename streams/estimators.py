"""Advantages from the rewards of one group, in order, and for some from the rewards that came before it.

With rloo, grpo and dr_grpo a constant group, and a lone member, give exactly 0.0: no learning signal, and no
rounding noise in its place. reinforce_pp, reinforce_pp_baseline and ema look at the partition's last rewards
too (streams/baselines.py), so that lone members have a signal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol


class Estimator(Protocol):
    """[G] finite rewards, [H] finite rewards that came before them, oldest first -> [G] finite advantages."""

    def __call__(self, rewards: Sequence[float], history: Sequence[float] = (), /) -> list[float]:
        """The advantages of one group."""
        ...


GRPO_EPSILON = 1e-4


def rloo(rewards: Sequence[float], history: Sequence[float] = (), /) -> list[float]:
    """Reward minus the mean of the others = G/(G-1) (r - mean) (Ahmadian et al., arXiv 2402.14740)."""
    g = len(rewards)
    return _centred(rewards, lambda deviations: g / (g - 1))


def grpo(rewards: Sequence[float], history: Sequence[float] = (), /) -> list[float]:
    """(r - mean) / (sample standard deviation + 1e-4) (Shao et al., arXiv 2402.03300)."""

    def scale(deviations: Sequence[float]) -> float:
        variance = math.fsum(d * d for d in deviations) / (len(deviations) - 1)
        return 1.0 / (math.sqrt(variance) + GRPO_EPSILON)

    return _centred(rewards, scale)


def dr_grpo(rewards: Sequence[float], history: Sequence[float] = (), /) -> list[float]:
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


def reinforce_pp(rewards: Sequence[float], history: Sequence[float] = (), /) -> list[float]:
    """(r - mean) / std over the global batch (REINFORCE++, Hu et al., arXiv 2501.03262).

    The batch is the history and the group itself: what a trainer batches is not a function of the log.
    """
    if not rewards:
        return []
    batch = [*history, *rewards]
    scale = _deviation(batch)
    mean = mean_of(batch)
    return [(r - mean) / (scale + GRPO_EPSILON) if scale else 0.0 for r in rewards]


def reinforce_pp_baseline(rewards: Sequence[float], history: Sequence[float] = (), /) -> list[float]:
    """(r - mean of the group) / std over the global batch (the paper's variant with a group baseline).

    The paper takes the deviation of the centred rewards of a batch; here it is that of the rewards of history
    and group, for the centred ones of earlier groups depend on when these closed. A lone member is centred by
    history and group.
    """
    if len(rewards) < 2:
        return reinforce_pp(rewards, history)
    scale = _deviation([*history, *rewards])
    return [d / (scale + GRPO_EPSILON) for d in dr_grpo(rewards)]


def ema(rewards: Sequence[float], history: Sequence[float] = (), /, *, decay: float = 0.99) -> list[float]:
    """r - baseline, the exponentially weighted mean of the history (Williams 1992's reinforcement baseline).

    Truncated and normalised: sum decay^k h_k / sum decay^k, k = 0 for the newest, so that it has no start value
    and depends on the history in hand only. Without a history it is dr_grpo: a lone member gets 0.0.
    """
    if not history:
        return dr_grpo(rewards)
    weights = [decay**k for k in range(len(history))]
    newest = history[-1]  # deviations from it: a constant history is its own baseline, exactly
    shift = math.fsum(w * (h - newest) for w, h in zip(weights, reversed(history), strict=True))
    baseline = newest + shift / math.fsum(weights)
    return [r - baseline for r in rewards]


def _deviation(values: Sequence[float]) -> float:
    """Population standard deviation; exactly 0.0 where all are equal."""
    if all(v == values[0] for v in values):
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


ESTIMATORS: dict[str, Estimator] = {
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "ema": ema,
}
WITH_HISTORY = frozenset({"reinforce_pp", "reinforce_pp_baseline", "ema"})


def estimator_of(name: str, *, ema_decay: float) -> Estimator:
    """The estimator called `name`."""
    return partial(ema, decay=ema_decay) if name == "ema" else ESTIMATORS[name]
