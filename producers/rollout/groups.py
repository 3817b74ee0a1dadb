"""A task -> the group its rollouts share, and the environment each of them gets."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

from ...schemas.config import RolloutConfig
from ...schemas.errors import ConfigError, InvalidMessageError
from ...schemas.task import Task
from ...schemas.trajectory import Sampling
from ..environments.base import Environment, Factory, environment_args, load_environment
from .episode import Group
from .tokenizing import Message, PolicyTokenizer, TokenizingError


class GroupMaker:
    """Turns tasks into groups under one configuration."""

    def __init__(self, config: RolloutConfig, tokenizer: PolicyTokenizer) -> None:
        """ConfigError for a stop text or a default environment that cannot work."""
        self._config = config
        self.tokenizer = tokenizer
        self._stop = tokenizer.stop_ids(config.stop)
        self._factories: dict[str, Factory] = {config.environment: load_environment(config.environment)}

    def size(self, task: Task) -> int:
        """Rollouts in a group of this task."""
        return task.group_size or self._config.group_size

    def make(self, task: Task, group_id: str, deadline_ms: int) -> tuple[Group, Callable[[], Environment]]:
        """The group, and what builds one environment for each rollout.

        InvalidMessageError when this task can never be rolled out here.
        """
        try:
            factory = self._factory(task.environment or self._config.environment)
            args = environment_args(task, self._config.environment_args)
            prompt: str | list[Message] = task.prompt if task.prompt is not None else _messages(task)
            ids = (
                self.tokenizer.prompt_ids(prompt)
                if isinstance(prompt, str)
                else self.tokenizer.chat_ids(prompt)
            )
        except ConfigError as e:
            raise InvalidMessageError("environment", str(e)) from None
        except TokenizingError as e:
            raise InvalidMessageError(e.reason, str(e)) from None
        except (ValueError, TypeError) as e:
            raise InvalidMessageError("task", str(e)) from None
        if not ids or len(ids) >= self._config.max_total_tokens:
            raise InvalidMessageError(
                "prompt_length",
                f"{len(ids)} tokens; rollout.max_total_tokens is {self._config.max_total_tokens}",
            )
        group = Group(
            group_id=group_id,
            task=task,
            size=self.size(task),
            deadline_ms=deadline_ms,
            prompt=prompt,
            prompt_ids=ids,
            sampling=Sampling(
                temperature=self._config.temperature,
                top_p=self._config.top_p,
                top_k=self._config.top_k,
                max_tokens=task.max_tokens or self._config.max_tokens,
            ),
            stop_token_ids=self._stop,
            max_turns=self._config.max_turns,
            max_total_tokens=self._config.max_total_tokens,
            environment_seconds=self._config.environment_seconds,
        )
        return group, functools.partial(factory, **args)

    def _factory(self, name: str) -> Factory:
        if name not in self._factories:
            self._factories[name] = load_environment(name)
        return self._factories[name]


def _messages(task: Task) -> list[Message]:
    value = json.loads(task.messages or "[]")
    if not (isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)):
        raise ValueError("messages is not a JSON list of {role, content}")
    return value
