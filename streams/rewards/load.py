"""Reward functions by name: a built-in one, or `module:attr`."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...schemas.errors import ConfigError
from .base import Reward
from .builtin import BUILTIN


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function and how it must be called."""

    name: str
    call: Reward
    inline: bool
    """Cheap and ours: called on the event loop itself."""
    is_async: bool
    init: Mapping[str, Any] = field(default_factory=dict)
    """What a class was made with."""
    ours: bool = False
    """Built in: runs in the worker itself."""


def load_reward(name: str, args: Mapping[str, Any] | None = None) -> LoadedReward:
    """The reward called `name`. A class is instantiated with `args`; a function finds them in `rollout.args`.

    Raises ConfigError that says what was tried.
    """
    if name in BUILTIN:
        return LoadedReward(name, BUILTIN[name], inline=True, is_async=False, ours=True)
    call = _import(name)
    if inspect.isclass(call):
        try:
            call = call(**dict(args or {}))
        except Exception as e:
            raise ConfigError(f"reward {name!r}: {call.__name__}({_shown(args)}) failed: {e}") from e
    if not callable(call):
        raise ConfigError(f"reward {name!r} is a {type(call).__name__}, not a function")
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(
        getattr(call, "__call__", None)  # noqa: B004
    )
    return LoadedReward(name, call, inline=False, is_async=is_async, init=dict(args or {}))


def _import(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        known = ", ".join(sorted(BUILTIN))
        raise ConfigError(
            f"reward {name!r} is neither built in ({known}) nor written as module:attr, such as my_rewards:score"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as e:
        raise ConfigError(
            f"reward {name!r}: tried to import module {module_name!r}: {type(e).__name__}: {e}; "
            "it is looked for on PYTHONPATH and in the working directory"
        ) from e
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = ", ".join(n for n in dir(found) if not n.startswith("_"))[:200]
            raise ConfigError(
                f"reward {name!r}: module {module_name!r} was imported but has no {part!r}; it has: {public}"
            ) from None
    return found


def _shown(args: Mapping[str, Any] | None) -> str:
    return json.dumps(dict(args or {}), default=str)[:100]
