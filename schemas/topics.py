"""Every topic in one table: partitions, retention, size. Nothing relies on auto-creation.

A name is `<namespace>.<topic>`, and `<namespace>.<topic>.<policy_id>` for topics that exist per policy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import ConfigError

_NAME = re.compile(r"^[A-Za-z0-9_-]{1,80}$")

MIB = 1024 * 1024
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """How one topic is created."""

    topic: str
    per_policy: bool = False
    partitions: int = 4
    """1 where order over the whole topic is the contract."""
    configs: dict[str, str] = field(default_factory=dict)
    """Kafka topic settings."""


def _bulk(days: int, mib: int) -> dict[str, str]:
    return {"retention.ms": str(days * DAY_MS), "max.message.bytes": str(mib * MIB)}


TASKS = TopicSpec(
    topic="tasks", partitions=1, configs={"retention.ms": "-1", "max.message.bytes": str(4 * MIB)}
)
_APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
"""The broker's clock decides: groups close by it, and producers measure their own against it."""

TRAJECTORIES = TopicSpec(topic="trajectories", configs=_bulk(7, 4) | _APPEND_TIME)
FEEDBACK = TopicSpec(topic="feedback", configs=_bulk(14, 1) | _APPEND_TIME)
SCORES = TopicSpec(topic="scores", configs=_bulk(7, 1) | _APPEND_TIME)
SAMPLES = TopicSpec(topic="samples", per_policy=True, configs=_bulk(7, 1))
WEIGHTS = TopicSpec(
    topic="weights",
    per_policy=True,
    partitions=1,
    configs={"retention.ms": "-1", "max.message.bytes": str(8 * MIB)},
)
ENGINES = TopicSpec(
    topic="engines",
    partitions=1,
    configs={"cleanup.policy": "compact,delete", "retention.ms": str(DAY_MS), "max.message.bytes": str(MIB)},
)
WORKERS = TopicSpec(topic="workers", partitions=1, configs=ENGINES.configs)
DEADLETTERS = TopicSpec(topic="deadletters", partitions=1, configs=_bulk(30, 5))

ALL_TOPICS = (TASKS, TRAJECTORIES, FEEDBACK, SCORES, SAMPLES, WEIGHTS, ENGINES, WORKERS, DEADLETTERS)


def checked_name(value: str, *, what: str) -> str:
    """`value` if it can be part of a topic name, a file name and a metric label; ConfigError otherwise."""
    if not _NAME.match(value):
        raise ConfigError(f"{what} is {value!r}: use 1 to 80 letters, digits, '-' or '_'")
    return value


@dataclass(frozen=True, slots=True)
class Topics:
    """The full names under one namespace."""

    namespace: str

    def __post_init__(self) -> None:
        checked_name(self.namespace, what="namespace")

    def name(self, spec: TopicSpec, policy_id: str | None = None) -> str:
        """Full topic name; `policy_id` is required exactly for the topics that exist per policy."""
        if spec.per_policy:
            if policy_id is None:
                raise ValueError(f"topic {spec.topic} exists per policy: pass policy_id")
            return f"{self.namespace}.{spec.topic}.{checked_name(policy_id, what='policy_id')}"
        return f"{self.namespace}.{spec.topic}"

    def group(self, role: str, policy_id: str | None = None) -> str:
        """Consumer group id of a role."""
        return f"{self.namespace}.{role}" if policy_id is None else f"{self.namespace}.{role}.{policy_id}"

    def changelog(self, role: str, table: str) -> str:
        """The changelog of a role's table, named as Faust wants it."""
        return f"{self.group(role)}-{table}-changelog"
