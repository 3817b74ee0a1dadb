"""Every Prometheus object, grouped by the process that knows it. One process is one scrape target.

Units are in the names; no label carries a version, an id, or anything a user types except `role`-like fixed
words. Counters with a closed label set exist at 0 from the start.
"""

from __future__ import annotations

import logging
import os
import socket
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from ..schemas.errors import ConfigError

logger = logging.getLogger(__name__)

REGISTRY = CollectorRegistry()

DROP_REASONS = (
    *("stale", "void", "eval", "late", "zero_variance", "truncated", "over_long"),
    *("duplicate", "payload", "advantage_not_finite"),
)
OTHER_REASON = "other"
VOID_REASONS = (
    *("aborted", "no_messages", "no_feedback", "turns_mismatch", "sandbox_unavailable"),
    *("reward_args", "reward_spec", "reward_unknown", "reward_raised", "reward_timeout", "reward_crashed"),
    *("reward_memory", "reward_network", "reward_write", "reward_processes", "reward_too_large"),
    *("reward_not_finite", "reward_not_number", "judge_unavailable", "judge_unparsable", OTHER_REASON),
)
RESTART_CAUSES = ("stalled", "killed", "crashed")
RESTARTS_VARIABLE = "HEADRACE_RESTARTS"
"""The environment variable by which a supervisor tells a role its restarts: `stalled=1,killed=2`."""
VERSION_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)

# every process
stage_records = Counter(
    "headrace_stage_records", "Records a stage has finished with.", ["stage"], registry=REGISTRY
)
dead_letters = Counter(
    "headrace_dead_letters", "Records that a stage could not use.", ["stage"], registry=REGISTRY
)
role_up = Gauge("headrace_role_up", "1 while the role's main loop runs.", ["role"], registry=REGISTRY)
role_restarts = Counter(
    "headrace_role_restarts",
    "Times the supervisor has started this role again, by why it had ended.",
    ["cause"],
    registry=REGISTRY,
)

# streams
scores = Counter("headrace_scores", "Scores by the verifier's status.", ["status"], registry=REGISTRY)
scores_void = Counter(
    "headrace_scores_void",
    "Void scores by reason; a reward's own word is `other`.",
    ["reason"],
    registry=REGISTRY,
)
reward_seconds = Histogram("headrace_reward_seconds", "Time in reward functions.", registry=REGISTRY)
groups_closed = Counter("headrace_groups_closed", "Groups by what closed them.", ["cause"], registry=REGISTRY)
groups_open = Gauge("headrace_groups_open", "Groups that wait for members.", registry=REGISTRY)
samples_admitted = Counter(
    "headrace_samples_admitted", "Samples passed on to the trainer.", registry=REGISTRY
)
samples_dropped = Counter(
    "headrace_samples_dropped", "Samples not trained, by reason.", ["reason"], registry=REGISTRY
)
rereads = Counter(
    "headrace_rereads", "Times a partition was read again because a record was missing.", registry=REGISTRY
)
offsets_without_record = Counter(
    "headrace_offsets_without_record",
    "Offsets passed over because the broker has no record there: compaction, transactions.",
    registry=REGISTRY,
)
records_expired = Counter(
    "headrace_records_expired", "Records that retention removed before they were read.", registry=REGISTRY
)
feedback_pending = Gauge("headrace_feedback_pending", "Rollouts that wait for outcomes.", registry=REGISTRY)
feedback_outcomes = Counter(
    "headrace_feedback_outcomes", "Outcome events by what became of them.", ["fate"], registry=REGISTRY
)
feedback_settled = Counter(
    "headrace_feedback_settled", "Scores that waited, by what settled them.", ["cause"], registry=REGISTRY
)

gate_in_flight = Histogram(
    "headrace_gate_staleness_in_flight_versions",
    "Lag of scores at the gate: the part that arose while sampling.",
    buckets=VERSION_BUCKETS,
    registry=REGISTRY,
)
gate_in_queue = Histogram(
    "headrace_gate_staleness_in_queue_versions",
    "Lag of scores at the gate: the part that arose while waiting.",
    buckets=VERSION_BUCKETS,
    registry=REGISTRY,
)

# rollout worker
rollouts = Counter("headrace_rollouts", "Rollouts by how they ended.", ["status"], registry=REGISTRY)
rollouts_running = Gauge("headrace_rollouts_running", "Rollouts in flight.", registry=REGISTRY)
rollout_seconds = Histogram("headrace_rollout_seconds", "From start to acknowledged.", registry=REGISTRY)
admission_waits = Counter(
    "headrace_admission_wait_seconds", "Time without capacity to start a rollout.", registry=REGISTRY
)
rollouts_forgotten = Counter(
    "headrace_rollouts_forgotten", "Rollouts whose fate nobody told in time.", registry=REGISTRY
)
clock_skew_seconds = Gauge(
    "headrace_clock_skew_seconds", "This process's clock minus the broker's.", registry=REGISTRY
)

# gateway
gateway_requests = Counter(
    "headrace_gateway_requests",
    "Requests by API and HTTP status; 499: the client left.",
    ["api", "status"],
    registry=REGISTRY,
)
gateway_in_flight = Gauge("headrace_gateway_requests_in_flight", "Requests being served.", registry=REGISTRY)
gateway_rollouts_open = Gauge(
    "headrace_gateway_rollouts_open", "Rollouts that take requests.", registry=REGISTRY
)
gateway_branches = Counter(
    "headrace_gateway_branches",
    "Turns that do not continue the newest turn of their agent, by why.",
    ["reason"],
    registry=REGISTRY,
)
gateway_trajectories = Counter(
    "headrace_gateway_trajectories", "Trajectories that Kafka has, by status.", ["status"], registry=REGISTRY
)
gateway_spool_rollouts = Gauge(
    "headrace_gateway_spool_rollouts", "Finished rollouts that wait for Kafka.", registry=REGISTRY
)
gateway_spool_bytes = Gauge("headrace_gateway_spool_bytes", "Their size on disk.", registry=REGISTRY)

# engine
engine_version = Gauge("headrace_engine_policy_version", "Version served.", registry=REGISTRY)
engine_running = Gauge("headrace_engine_requests_running", "Requests in flight.", registry=REGISTRY)
engine_tokens = Counter("headrace_engine_generated_tokens", "Tokens sampled.", registry=REGISTRY)
engine_updates = Counter(
    "headrace_engine_updates", "Weight updates by result.", ["result"], registry=REGISTRY
)
engine_pause_seconds = Histogram(
    "headrace_engine_pause_seconds",
    "Time without tokens during an update.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)
engine_poisoned = Gauge("headrace_engine_poisoned", "1 while the weights are torn.", registry=REGISTRY)

# trainer
policy_version = Gauge("headrace_policy_version", "Version trained.", registry=REGISTRY)
reward_mean = Gauge("headrace_reward_mean", "Mean reward of the last batch.", ["split"], registry=REGISTRY)
policy_entropy = Gauge("headrace_policy_entropy_nats", "Mean over sampled tokens.", registry=REGISTRY)
importance_weight_max = Gauge("headrace_importance_weight_max", "Before truncation.", registry=REGISTRY)
importance_weight_clipped = Gauge(
    "headrace_importance_weight_clipped_ratio", "Share of tokens at the cap.", registry=REGISTRY
)
grad_norm = Gauge("headrace_grad_norm", "Before clipping.", registry=REGISTRY)
checkpoints_failed = Counter(
    "headrace_checkpoints_failed", "Checkpoints that could not be written.", registry=REGISTRY
)
nonfinite_steps = Counter(
    "headrace_nonfinite_steps", "Steps whose gradient was not finite.", registry=REGISTRY
)
staleness_versions = Histogram(
    "headrace_trajectory_staleness_versions",
    "Lag of trained samples in versions.",
    buckets=VERSION_BUCKETS,
    registry=REGISTRY,
)
staleness_in_flight = Histogram(
    "headrace_trajectory_staleness_in_flight_versions",
    "The part that arose while sampling.",
    buckets=VERSION_BUCKETS,
    registry=REGISTRY,
)
staleness_in_queue = Histogram(
    "headrace_trajectory_staleness_in_queue_versions",
    "The part that arose while waiting.",
    buckets=VERSION_BUCKETS,
    registry=REGISTRY,
)
samples_stale = Counter(
    "headrace_trainer_samples_stale",
    "Samples that the trainer dropped as stale, by where the lag that was too much arose: while sampling, or after.",
    ["part"],
    registry=REGISTRY,
)
phase_seconds = Counter(
    "headrace_phase_seconds", "Trainer time by phase: update or stall.", ["phase"], registry=REGISTRY
)
last_step_timestamp = Gauge(
    "headrace_trainer_last_step_timestamp_seconds", "Unix time of the last step.", registry=REGISTRY
)
trained_samples = Counter("headrace_trained_samples", "Samples trained.", registry=REGISTRY)
trained_tokens = Counter("headrace_trained_tokens", "Tokens in trained samples.", registry=REGISTRY)
mfu = Gauge("headrace_trainer_mfu_ratio", "Model FLOPs utilisation of the update phase.", registry=REGISTRY)
delta_bytes = Counter("headrace_delta_bytes", "Bytes of weight deltas published.", registry=REGISTRY)
publish_seconds = Histogram(
    "headrace_weights_publish_seconds", "Encode, upload and commit.", registry=REGISTRY
)


def _start_at_zero() -> None:
    for reason in DROP_REASONS:
        samples_dropped.labels(reason=reason)
    for status in ("scored", "failed", "void"):
        scores.labels(status=status)
    for reason in VOID_REASONS:
        scores_void.labels(reason=reason)
    for cause in RESTART_CAUSES:
        role_restarts.labels(cause=cause)
    for fate in ("taken", "duplicate", "late", "unknown"):
        feedback_outcomes.labels(fate=fate)
    for cause in ("outcomes", "default", "void"):
        feedback_settled.labels(cause=cause)
    for cause in ("complete", "deadline"):
        groups_closed.labels(cause=cause)
    for status in ("completed", "aborted"):
        rollouts.labels(status=status)
        gateway_trajectories.labels(status=status)
    for reason in ("edited", "compaction", "tools_changed", "template", "ambiguous", "resampled"):
        gateway_branches.labels(reason=reason)
    for result in ("applied", "refused", "failed"):
        engine_updates.labels(result=result)
    for part in ("in_flight", "in_queue"):
        samples_stale.labels(part=part)
    for phase in ("update", "stall"):
        phase_seconds.labels(phase=phase)
    for stage in ("rollout", "verify", "feedback", "advantage", "trainer", "engine"):
        dead_letters.labels(stage=stage)
        stage_records.labels(stage=stage)


_start_at_zero()


def count_score(status: str, reason: str | None) -> None:
    """A score that is sent; `reason`: why it is void."""
    scores.labels(status=status).inc()
    if status == "void":
        scores_void.labels(reason=reason if reason in VOID_REASONS else OTHER_REASON).inc()


def note_restarts(text: str) -> None:
    """Count the restarts in `text`, as in RESTARTS_VARIABLE: they outlive the process that they ended."""
    for item in filter(None, text.split(",")):
        cause, _, count = item.partition("=")
        if cause in RESTART_CAUSES and count.isdigit():
            role_restarts.labels(cause=cause).inc(int(count))
        else:
            logger.warning("%s: %r is not one of %s=N", RESTARTS_VARIABLE, item, "/".join(RESTART_CAUSES))


def serve(host: str, port: int) -> tuple[WSGIServer, int]:
    """Serve /metrics in a thread; returns the server and its port (the one chosen, when `port` is 0)."""
    note_restarts(os.environ.get(RESTARTS_VARIABLE, ""))
    try:
        server, _ = start_http_server(port, addr=host, registry=REGISTRY)
    except (OSError, socket.gaierror) as e:
        raise ConfigError(
            f"metrics.port {port} on {host} cannot be used ({e}); choose another, or 0 for a free one"
        ) from None
    return server, server.server_port
