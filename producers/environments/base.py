"""The Environment protocol: what answers the policy between its turns, and how one is found by name.

One object per rollout, built by a factory from the configured arguments (the task's own win), then driven by
the rollout worker: `start(task)`, and `step(text, token_ids)` after each turn until it returns None. Either
may be async; a sync one runs in a thread of its own (calls.py), and may block. What an environment raises, or a
call that takes over rollout.environment_seconds, aborts the rollout (an infrastructure failure, never a reward
of 0).
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...schemas.errors import ConfigError
from ...schemas.task import Task

T = TypeVar("T")

BUILT_IN = {
    "single_turn": ".single_turn:SingleTurn",
    "calculator": ".calculator:Calculator",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy reads next; its tokens are masked from the loss. Exactly one field is set."""

    text: str | None = None
    """Appended as it stands, special tokens in it as ordinary text."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Appended through the model's chat template: {role, content}, ..."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError("an Observation has either text or messages")


class Environment(Protocol):
    """One episode. Two optional attributes are honoured too:

    `stop_reason`: str, why the episode is over, read after `step` returned None;
    `close()`: called once at the end, however the rollout ends.
    """

    def start(self, task: Task) -> Observation | Awaitable[Observation | None] | None:
        """Begin; an observation is appended to the task's prompt."""

    def step(self, text: str, token_ids: Sequence[int]) -> Observation | Awaitable[Observation | None] | None:
        """Answer one turn (special tokens kept in `text`); None: the episode is over."""


Factory = Callable[..., Environment]
"""Called with the environment arguments as keywords, once per rollout."""


def load_environment(name: str) -> Factory:
    """The factory called `name`: a built-in or `module:attr`. ConfigError says what was tried."""
    if name in BUILT_IN:
        module, _, attr = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module, __package__), attr)
    known = f"built-in environments: {', '.join(sorted(BUILT_IN))}"
    module, colon, attr = name.partition(":")
    if not (module and colon and attr) or module.startswith("."):
        raise ConfigError(f"environment {name!r} is neither built in nor module:attr ({known})")
    try:
        found: Any = importlib.import_module(module)
    except Exception as e:
        raise ConfigError(
            f"environment {name!r}: tried to import {module}: {type(e).__name__}: {e} ({known})"
        ) from e
    try:
        for part in attr.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError(
            f"environment {name!r}: module {module} was imported from {getattr(found, '__file__', '?')} "
            f"but has no {attr!r}"
        ) from None
    if not callable(found):
        raise ConfigError(
            f"environment {name!r}: {attr} is a {type(found).__name__}, not a class or function"
        )
    return found


def check_args(name: str, factory: Factory, args: Mapping[str, Any]) -> None:
    """ConfigError where `factory`, found as `name`, does not take `args`; it is not called."""
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # some callables written in C say nothing about what they take
        return
    try:
        signature.bind(**args)
    except TypeError as e:
        takes = ", ".join(signature.parameters) or "no arguments"
        raise ConfigError(f"environment {name!r}: {e} (it takes: {takes})") from None


def environment_args(task: Task, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for a task's environment: the task's own over the configured ones.

    The configured ones belong to the configured environment; a task that names another gets only its own.
    Raises ValueError when the task's are not a JSON object.
    """
    own = json.loads(task.environment_args) if task.environment_args is not None else {}
    if not isinstance(own, dict):
        raise ValueError(f"environment_args of task {task.task_id} is not a JSON object")
    return dict(own) if task.environment is not None else {**configured, **own}


async def settled(value: T | Awaitable[T]) -> T:
    """`value`, awaited where it must be."""
    return await value if inspect.isawaitable(value) else value
