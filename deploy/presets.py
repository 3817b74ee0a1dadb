"""What `headrace demo` trains, and the settings that learn it: two tasks that two CPU cores master in minutes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..schemas.task import Task

POLICY = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One demo task."""

    task: str
    about: str
    settings: Mapping[str, Any]
    """Dotted configuration keys."""
    target: float
    """Exponential mean of the reward at which the demo is done."""
    max_steps: int
    max_seconds: float

    def tasks(self) -> Iterator[Task]:
        """The records for the tasks topic."""
        return _calculator() if self.task == "calculator" else _addition()


_COMMON: dict[str, Any] = {
    "run.namespace": "demo",
    "policy.id": POLICY,
    "rollout.group_size": 8,
    "rollout.concurrency": 256,
    "rollout.max_total_tokens": 64,
    "rollout.temperature": 1.0,
    "advantage.estimator": "rloo",
    "staleness.max_lag": 4,
    "staleness.admission_lag": 2,
    "engine.max_requests": 256,
    "trainer.batch_size": 128,
    "trainer.beta2": 0.99,
    "trainer.warmup_steps": 10,
}

CALCULATOR = Preset(
    task="calculator",
    about="two turns: `47+38=`, the model calls `[47+38]`, the environment answers `85>`, the model answers `85$`; "
    "it starts from a warm start on demonstrations of which most are wrong on purpose",
    settings=_COMMON
    | {
        "rollout.environment": "calculator",
        "rollout.stop": ["]"],
        "rollout.max_tokens": 10,
        "rollout.max_turns": 2,
        "verify.reward": "calculator",
        "trainer.lr": 6e-4,
        "trainer.entropy_coef": 0.01,
    },
    target=0.93,
    max_steps=600,
    max_seconds=600.0,
)
ADDITION = Preset(
    task="addition",
    about="one turn from random weights: `2+3=`, the model answers `5`",
    settings=_COMMON
    | {
        "rollout.environment": "single_turn",
        "rollout.max_tokens": 1,
        "rollout.max_turns": 1,
        "verify.reward": "exact_match",
        "trainer.lr": 8e-4,
        "trainer.entropy_coef": 0.02,
    },
    target=0.93,
    max_steps=1500,
    max_seconds=900.0,
)
PRESETS = {preset.task: preset for preset in (CALCULATOR, ADDITION)}


def _calculator() -> Iterator[Task]:
    for a in range(10, 50):
        for b in range(10, 50):
            yield Task(task_id=f"{a}+{b}", policy_id=POLICY, prompt=f"{a}+{b}=")


def _addition() -> Iterator[Task]:
    for a in range(10):
        for b in range(10 - a):
            spec = json.dumps({"name": "exact_match", "args": {"answer": str(a + b)}})
            yield Task(task_id=f"{a}+{b}", policy_id=POLICY, prompt=f"{a}+{b}=", reward_spec=spec)
