"""`headrace up`: the whole loop on one machine for the user's own model, tasks, rewards and environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..producers.environments.base import load_environment
from ..schemas.config import Config
from ..schemas.errors import ConfigError
from ..schemas.task import Task
from ..streams.rewards.load import load_reward
from .model_dir import check_model_dir
from .processes import require_free_port
from .running import Goal, run
from .stack import Plan
from .tasks import read_tasks


def up(config: Config, *, plugin_path: Sequence[Path], quiet: bool) -> dict[str, Any]:
    """Check everything that can be checked first, then run; returns the summary. Raises as `running.run` does."""
    tasks = check(config, plugin_path)
    steps = config.trainer.steps or None
    plan = Plan(config=config, tasks=tasks, plugin_path=plugin_path)
    return run(
        plan, Goal(steps=steps), title=f"headrace: {config.policy.id}", task=config.policy.id, quiet=quiet
    )


def check(config: Config, plugin_path: Sequence[Path]) -> list[Task]:
    """The tasks; ConfigError for the first thing that would stop a role later."""
    if config.rollout.tasks is None:
        raise ConfigError("rollout.tasks is not set: give a JSON Lines file; `headrace init` writes one")
    tasks = read_tasks(config.rollout.tasks, policy_id=config.policy.id)
    check_model_dir(config.policy.model, chat=any(task.messages is not None for task in tasks))
    sys.path += [str(p) for p in plugin_path if str(p) not in sys.path]
    load_reward(config.verify.reward, config.verify.reward_args)
    load_environment(config.rollout.environment)
    _check_ports(config)
    return tasks


def _check_ports(config: Config) -> None:
    how = "choose another with --set {key}=PORT, or 0 for a free one"
    for n in range(config.engine.count if config.engine.port else 0):
        require_free_port(
            config.engine.port + n,
            host=config.engine.host,
            what="engine.port",
            how=how.format(key="engine.port"),
        )
    if config.metrics.port:
        key = "metrics.port"
        require_free_port(config.metrics.port, host=config.metrics.host, what=key, how=how.format(key=key))
