"""Reward functions by name: a built-in one of the catalogue, or `module:attr`."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...schemas.errors import ConfigError
from .args import Args, check_args
from .base import Reward
from .builtin import ExactArgs, NumericArgs, addition, calculator, exact_match, numeric
from .builtin_text import JsonSchemaArgs, RegexArgs, json_schema, regex
from .code_tests import PythonTestsArgs, python_tests
from .composed import COMPOSED, ComposedArgs, not_called
from .judge import JudgeArgs, llm_judge


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
    unlimited: bool = False
    """Keeps a time limit of its own, which begins when it has a place to run."""
    late: str = "reward_timeout"
    """The reason where it passes verify.timeout_seconds."""
    parts: tuple[Part, ...] = ()
    """Of `composed`."""


@dataclass(frozen=True, slots=True)
class Part:
    """One component of a composed reward."""

    name: str
    weight: float
    reward: LoadedReward
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Builtin:
    """A reward that comes with headrace."""

    call: Reward
    args: type[Args] | None
    runs: Literal["inline", "thread", "async", "host"]
    unlimited: bool = False
    late: str = "reward_timeout"


CATALOGUE = {
    "exact_match": Builtin(exact_match, ExactArgs, "inline"),
    "numeric": Builtin(numeric, NumericArgs, "inline"),
    "calculator": Builtin(calculator, None, "inline"),
    "addition": Builtin(addition, None, "inline"),
    "regex": Builtin(regex, RegexArgs, "thread"),
    "json_schema": Builtin(json_schema, JsonSchemaArgs, "host"),
    "python_tests": Builtin(python_tests, PythonTestsArgs, "async", unlimited=True),
    "llm_judge": Builtin(llm_judge, JudgeArgs, "async", late="judge_unavailable"),
}
BUILTIN = (*CATALOGUE, COMPOSED)


def load_reward(name: str, args: Mapping[str, Any] | None = None, *, complete: bool = False) -> LoadedReward:
    """The reward called `name`. A class is instantiated with `args`; a function finds them in `rollout.args`.

    Raises ConfigError that says what was tried, or which of a built-in reward's `args` is wrong; one that has none
    at all is wrong only if they are `complete`.
    """
    if name == COMPOSED:
        return _composed(args or {})
    if name in CATALOGUE:
        return _builtin(name, CATALOGUE[name], args, complete)
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


def _builtin(name: str, found: Builtin, args: Mapping[str, Any] | None, complete: bool) -> LoadedReward:
    if (args or complete) and found.args is not None:
        check_args(name, found.args, args or {})
    return LoadedReward(
        name,
        found.call,
        inline=found.runs == "inline",
        is_async=found.runs == "async",
        ours=found.runs != "host",
        unlimited=found.unlimited,
        late=found.late,
    )


def _composed(args: Mapping[str, Any]) -> LoadedReward:
    check_args(COMPOSED, ComposedArgs, args)
    parts = []
    for name, part in ComposedArgs.model_validate(dict(args)).parts.items():
        try:
            parts.append(
                Part(name, part.weight, load_reward(part.reward, part.args, complete=True), part.args)
            )
        except ConfigError as e:
            raise ConfigError(f"reward {COMPOSED!r}, part {name!r}: {e}") from e
    return LoadedReward(COMPOSED, not_called, inline=False, is_async=True, ours=True, parts=tuple(parts))


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
