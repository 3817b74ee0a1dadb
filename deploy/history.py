"""What a run has done so far, computed from its log: the learning curve, lags, pauses, rates. No Kafka here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..schemas.engine import EngineStatus
from ..schemas.weights import BlobKind, WeightRecord

VOID = "void"
"""Reason of a sample whose reward or environment failed."""
EVAL = "eval"
EMA = 0.9
"""Weight of the past in the exponential mean of rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One policy version that was trained."""

    version: int
    at_ms: int
    reward_mean: float
    reward_ema: float
    lag_mean: float
    lag_max: float
    samples: int
    delta_bytes: int
    """0 where the version came as an anchor alone."""
    step_seconds: float | None


@dataclass(slots=True)
class _Engine:
    updates: int = 0
    tokens: int = 0
    version: int = -1


@dataclass(slots=True)
class History:
    """Fed with the records of `weights` and `engines`, in order, and with the fates on `samples`."""

    steps: list[Step] = field(default_factory=list)
    version: int | None = None
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    full_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest version."""
    engines: dict[str, EngineStatus] = field(default_factory=dict)
    pauses_ms: list[float] = field(default_factory=list)
    """One for each update of each engine."""
    updates: int = 0
    tokens: int = 0
    """Sampled by all engines."""
    trajectories: int = 0
    dead_letters: int = 0
    tokens_from_ms: int | None = None
    tokens_until_ms: int | None = None
    admitted: int = 0
    """Rollouts' trajectories admitted to training since the run began to be followed."""
    refused: Counter[str] = field(default_factory=Counter)
    """The others since then, by reason; `dropped` is what the trainer passed over up to its newest version."""
    _engines: dict[str, _Engine] = field(default_factory=dict)

    def add_weights(self, record: WeightRecord) -> None:
        """A new policy version."""
        self.version = record.version
        self.full_bytes = record.full_bytes or self.full_bytes
        self.trained += record.trained
        self.dropped.update(record.dropped)
        self.metrics = dict(record.metrics)
        reward = record.metrics.get("reward_mean")
        if reward is None or not record.trained:
            return
        before = self.steps[-1].reward_ema if self.steps else reward
        self.steps.append(
            Step(
                version=record.version,
                at_ms=record.created_ms,
                reward_mean=reward,
                reward_ema=EMA * before + (1 - EMA) * reward,
                lag_mean=record.metrics.get("lag_mean", 0.0),
                lag_max=record.metrics.get("lag_max", 0.0),
                samples=record.trained,
                delta_bytes=sum(b.size for b in record.blobs_of(BlobKind.DELTA)),
                step_seconds=record.metrics.get("step_seconds"),
            )
        )

    def add_engine(self, status: EngineStatus) -> None:
        """A status of an engine; updates that go back mean that it was restarted."""
        before = self._engines.setdefault(status.engine_id, _Engine())
        if status.updates < before.updates:
            before.updates, before.tokens, before.version = 0, 0, -1
        # The first weights after its start are a load: nobody was waiting for tokens.
        applied = status.updates - before.updates - (before.version < 0)
        if applied > 0:
            self.updates += applied
            if status.pause_ms is not None:
                self.pauses_ms.append(status.pause_ms)
        if status.generated_tokens > before.tokens:
            self.tokens += status.generated_tokens - before.tokens
            if self.tokens_from_ms is None:
                self.tokens_from_ms = status.at_ms
                self.tokens = 0
            self.tokens_until_ms = status.at_ms
        before.updates, before.version = status.updates, status.version
        # A request that is taken back after a pause takes its last tokens with it.
        before.tokens = max(before.tokens, status.generated_tokens)
        self.engines[status.engine_id] = status

    def add_fate(self, reason: str | None) -> None:
        """A sample: admitted, or dropped for `reason`."""
        if reason is None:
            self.admitted += 1
        else:
            self.refused[reason] += 1

    @property
    def voids(self) -> int:
        """How many are void."""
        return self.refused[VOID]

    @property
    def fated(self) -> int:
        """How many have a fate, those of evaluation tasks left out: they are never trained."""
        return self.admitted + self.refused.total() - self.refused[EVAL]

    def all_void(self, *, at_least: int, since_ms: int) -> bool:
        """True when of so many fates every one is void, and nothing was trained since: no reward is ever known.

        Groups without variance and truncated answers are the policy's, and luck may end them.
        """
        if self.voids < at_least or self.voids < self.fated:
            return False
        return not self.trained_since(since_ms)

    def trained_since(self, since_ms: int) -> bool:
        """True when a version was trained since then; a run that goes on has older ones in its log."""
        return bool(self.steps) and self.steps[-1].at_ms >= since_ms

    @property
    def reward(self) -> float | None:
        """Exponential mean of the batches' mean rewards."""
        return self.steps[-1].reward_ema if self.steps else None

    @property
    def best_reward(self) -> float | None:
        """The highest that the exponential mean has been, the first batch left out: one batch is no mean."""
        return max((step.reward_ema for step in self.steps[1:]), default=None)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens a second between the first and the last engine status that told of new ones."""
        if self.tokens_from_ms is None or self.tokens_until_ms is None:
            return 0.0
        seconds = (self.tokens_until_ms - self.tokens_from_ms) / 1000
        return self.tokens / seconds if seconds > 0 else 0.0

    def summary(self, *, task: str, seed: int, seconds: float, started_ms: int) -> dict[str, Any]:
        """The run in numbers. Reward is the verifier's, on training samples; `reward_end` its exponential mean."""
        deltas = [s.delta_bytes for s in self.steps if s.delta_bytes]
        samples = sum(s.samples for s in self.steps)
        return {
            "task": task,
            "seed": seed,
            "steps": len(self.steps),
            "seconds": round(seconds, 2),
            "first_step_seconds": round((self.steps[0].at_ms - started_ms) / 1000, 2) if self.steps else None,
            "reward_start": _rounded(self.steps[0].reward_mean if self.steps else None),
            "reward_end": _rounded(self.reward),
            "policy_version": self.version,
            "trajectories": self.trajectories,
            "trained": self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "dead_letters": self.dead_letters,
            "lag_mean": _rounded(
                sum(s.lag_mean * s.samples for s in self.steps) / samples if samples else None
            ),
            "lag_max": int(max((s.lag_max for s in self.steps), default=0)),
            "updates": self.updates,
            "pause_ms_p50": _rounded(percentile(self.pauses_ms, 50)),
            "pause_ms_max": _rounded(max(self.pauses_ms, default=None)),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "delta_bytes": round(statistics.mean(deltas)) if deltas else 0,
            "full_bytes": self.full_bytes,
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
