"""`headrace up`: the whole loop on one machine for the user's own model, tasks, rewards and environment."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..producers.engines.vllm.local import require_vllm
from ..producers.environments.base import check_args, environment_args, load_environment
from ..schemas.config import Config
from ..schemas.errors import ConfigError
from ..schemas.task import Task
from ..streams.rewards.load import load_reward
from ..streams.sandbox.layers import probe
from .broker.choice import broker_reason
from .model_dir import check_model_dir
from .processes import require_free_port
from .run_dir import check_same_run
from .running import Goal, run
from .stack import Plan
from .tasks import numbered_tasks


def up(config: Config, *, plugin_path: Sequence[Path], quiet: bool) -> dict[str, Any]:
    """Check everything that can be checked first, then run; returns the summary. Raises as `running.run` does."""
    tasks = check(config, plugin_path)
    steps = config.trainer.steps or None
    plan = Plan(config=config, tasks=tasks, plugin_path=plugin_path)
    return run(
        plan,
        Goal(steps=steps),
        title=f"headrace: {config.policy.id}",
        about=f"broker: {broker_reason(config.kafka)}",
        task=config.policy.id,
        quiet=quiet,
    )


def check(config: Config, plugin_path: Sequence[Path]) -> list[Task]:
    """The tasks; ConfigError for the first thing that would stop a role later."""
    lines = _tasks(config)
    tasks = list(lines.values())
    require_vllm(config.engine)
    chat = config.gateway.enabled or any(task.messages is not None for task in tasks)
    check_model_dir(config.policy.model, chat=chat)
    sys.path += [str(p) for p in plugin_path if str(p) not in sys.path]
    default_used = config.gateway.enabled or any(task.reward_spec is None for task in tasks)
    load_reward(config.verify.reward, config.verify.reward_args, complete=default_used)
    if config.verify.sandbox == "require" and (missing := probe()):
        raise ConfigError(
            f"verify.sandbox is require, and this machine lacks {'; '.join(missing)}: set it to prefer, or see doctor"
        )
    load_environment(config.rollout.environment)
    _check_plugins(config, lines)
    check_same_run(config.run.dir, config)
    _check_ports(config)
    return tasks


def _tasks(config: Config) -> Mapping[int, Task]:
    """Line number -> task; none where all rollouts come from a gateway."""
    if not config.rollout.workers:
        if not config.gateway.enabled:
            raise ConfigError(
                "rollout.workers = 0: then rollouts come from harnesses: set gateway.enabled = true"
            )
        return {}
    if config.rollout.tasks is None:
        raise ConfigError(
            "rollout.tasks is not set: give a JSON Lines file (`headrace init` writes one), or set rollout.workers = 0"
            " where all rollouts come from the gateway"
        )
    return numbered_tasks(config.rollout.tasks, policy_id=config.policy.id)


def _check_plugins(config: Config, lines: Mapping[int, Task]) -> None:
    """Load each distinct reward and environment that tasks name. ConfigError says in which line it is first."""
    seen: set[tuple[str, ...]] = set()
    for number, task in lines.items():
        where = f"{config.rollout.tasks} line {number}"
        if task.reward_spec is not None and ("reward", task.reward_spec) not in seen:
            seen.add(("reward", task.reward_spec))
            spec = json.loads(task.reward_spec)
            try:
                load_reward(spec["name"], spec.get("args"), complete=True)
            except ConfigError as e:
                raise ConfigError(f'{where}, field "reward": {e}') from e
        key = ("environment", task.environment or "", task.environment_args or "")
        if key not in seen:
            seen.add(key)
            _check_environment(config, task, where)


def _check_environment(config: Config, task: Task, where: str) -> None:
    name = task.environment or config.rollout.environment
    field = "environment" if task.environment is not None else "environment_args"
    own = task.environment is not None or task.environment_args is not None
    try:
        check_args(name, load_environment(name), environment_args(task, config.rollout.environment_args))
    except ConfigError as e:
        raise ConfigError(
            f'{where}, field "{field}": {e}' if own else f"rollout.environment_args: {e}"
        ) from e


def _check_ports(config: Config) -> None:
    how = "choose another with --set {key}=PORT, or 0 for a free one"
    for n in range(config.engine.count if config.engine.port else 0):
        require_free_port(
            config.engine.port + n,
            host=config.engine.host,
            what="engine.port",
            how=how.format(key="engine.port"),
        )
    if config.gateway.enabled and config.gateway.port:
        key = "gateway.port"
        require_free_port(config.gateway.port, host=config.gateway.host, what=key, how=how.format(key=key))
    if config.metrics.port:
        key = "metrics.port"
        require_free_port(config.metrics.port, host=config.metrics.host, what=key, how=how.format(key=key))
