"""What one step tells: the weight record's `metrics`, and the process's Prometheus objects."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...streams import metrics
from .builder import Admitted
from .step import StepResult

OWN_REASONS = ("stale", "duplicate", "payload")
"""Dropped here; everything else was dropped, and counted, at the gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one step."""

    stall: float
    """Waiting for samples and fetching payloads."""
    update: float
    publish: float
    """Encoding and storing; the commit comes after the record is written."""


def step_metrics(
    result: StepResult, trained: Sequence[Admitted], timing: Timing, peak: float
) -> dict[str, float]:
    """The record's metrics; what is not finite is left out. `peak`: FLOP/s, 0 when unknown."""
    rewards = [a.sample.reward for a in trained if a.sample.reward is not None]
    lags = [a.lag for a in trained]
    n = max(len(lags), 1)
    values = {
        **result.metrics,
        "samples": float(len(trained)),
        "reward_mean": sum(rewards) / len(rewards) if rewards else math.nan,
        "lag_mean": sum(lag.total for lag in lags) / n,
        "lag_max": float(max((lag.total for lag in lags), default=0)),
        "lag_in_flight_mean": sum(lag.in_flight for lag in lags) / n,
        "lag_in_queue_mean": sum(lag.in_queue for lag in lags) / n,
        "update_seconds": timing.update,
        "stall_seconds": timing.stall,
        "publish_seconds": timing.publish,
        "step_seconds": timing.stall + timing.update + timing.publish,
        "mfu": result.flops / timing.update / peak if peak > 0 and timing.update > 0 else math.nan,
    }
    return {name: value for name, value in values.items() if math.isfinite(value)}


def export(
    result: StepResult, trained: Sequence[Admitted], dropped: Mapping[str, int], values: Mapping[str, float]
) -> None:
    """Set the Prometheus objects of a step that is published."""
    metrics.policy_version.set(result.version)
    gauges = {
        "entropy": metrics.policy_entropy,
        "importance_weight_max": metrics.importance_weight_max,
        "importance_weight_clipped": metrics.importance_weight_clipped,
        "grad_norm": metrics.grad_norm,
        "mfu": metrics.mfu,
    }
    for name, gauge in gauges.items():
        if name in values:
            gauge.set(values[name])
    if "reward_mean" in values:
        metrics.reward_mean.labels(split="train").set(values["reward_mean"])
    if not result.finite:
        metrics.nonfinite_steps.inc()
    for a in trained:
        metrics.staleness_versions.observe(a.lag.total)
        metrics.staleness_in_flight.observe(a.lag.in_flight)
        metrics.staleness_in_queue.observe(a.lag.in_queue)
    for reason in OWN_REASONS:
        metrics.samples_dropped.labels(reason=reason).inc(dropped.get(reason, 0))
    in_queue = values["stale_in_queue"]
    metrics.samples_stale.labels(part="in_queue").inc(in_queue)
    metrics.samples_stale.labels(part="in_flight").inc(dropped.get("stale", 0) - in_queue)
    metrics.stage_records.labels(stage="trainer").inc(len(trained) + sum(dropped.values()))
    metrics.trained_samples.inc(len(trained))
    metrics.trained_tokens.inc(result.tokens)
    metrics.phase_seconds.labels(phase="stall").inc(values["stall_seconds"])
    metrics.phase_seconds.labels(phase="update").inc(values["update_seconds"])
    metrics.last_step_timestamp.set(time.time())
