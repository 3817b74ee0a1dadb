"""Arguments of the built-in rewards: models that name the argument which is wrong, at load and at each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ...schemas.errors import ConfigError, RewardError

CODE_FENCE = "```"


class Args(BaseModel):
    """Of a built-in reward."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


A = TypeVar("A", bound=Args)


def parsed(model: type[A], args: Mapping[str, Any]) -> A:
    """`args` as `model`. RewardError `reward_args` that names the argument."""
    try:
        return model.model_validate(dict(args))
    except ValidationError as e:
        raise RewardError("reward_args", _told(model, e)) from None


def check_args(name: str, model: type[Args], args: Mapping[str, Any]) -> None:
    """ConfigError that names the argument of the reward `name` that is wrong."""
    try:
        model.model_validate(dict(args))
    except ValidationError as e:
        raise ConfigError(f"reward {name!r}: {_told(model, e)}") from None


def last_block(text: str, language: str) -> str | None:
    """The last fenced block of Markdown that is marked `language` or not marked; a block must be closed."""
    found: str | None = None
    opened: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        mark = line.strip()
        if opened is None and mark.startswith(CODE_FENCE):
            opened, lines = mark[len(CODE_FENCE) :].strip().lower(), []
        elif opened is not None and mark.startswith(CODE_FENCE):
            if opened in (language, ""):
                found = "\n".join(lines)
            opened = None
        elif opened is not None:
            lines.append(line)
    return found


def _told(model: type[Args], error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    takes = ", ".join(field.alias or name for name, field in model.model_fields.items())
    about = f"argument {where!r}: " if where else ""
    return f"{about}{first['msg'].removeprefix('Value error, ')} (it takes: {takes})"
