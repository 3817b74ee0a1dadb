"""Reads the configuration: one TOML (or JSON) file, environment variables over it, flags over those.

An error names the key, what is wrong and what would be right. Environment: HEADRACE_<SECTION>__<KEY>=value.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from .config import Config
from .errors import ConfigError

ENV_PREFIX = "HEADRACE_"


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Config:
    """The configuration from `path` (TOML, or JSON by suffix), `env` over it, `overrides` over those.

    `overrides` maps dotted keys ("trainer.lr") to values; None values are left out. Paths come out absolute:
    those in the file start at its folder, others at the working directory. Raises ConfigError, which says where a
    bad value came from; `flags` names the option of an override that was not given with --set.
    """
    tree = _read(path) if path is not None else {}
    if path is not None:
        _anchor(tree, Config, path.absolute().parent)
    sources: dict[str, str] = {}
    for name, value in (env or {}).items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            key = name[len(ENV_PREFIX) :].lower().replace("__", ".")
            sources[key] = name
            _put(tree, key, _parse(value), source=name)
    for key, value in (overrides or {}).items():
        if value is not None:
            sources[key] = (flags or {}).get(key, f"--set {key}")
            _put(tree, key, value, source=sources[key])
    _anchor(tree, Config, Path.cwd())
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        raise ConfigError(
            "\n".join(_source(item, sources, path) + _explain(item) for item in e.errors())
        ) from None


def dump_config(config: Config, path: Path) -> None:
    """Write `config` as JSON, secrets included, readable by its owner alone: what the supervisor hands to roles."""
    tree = config.model_dump(mode="json")
    if config.kafka.sasl_password is not None:
        tree["kafka"]["sasl_password"] = config.kafka.sasl_password.get_secret_value()
    path.touch(mode=0o600)
    path.write_text(json.dumps(tree, indent=1))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `headrace init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    try:
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as e:
        raise ConfigError(
            f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {e}"
        ) from None


def _anchor(tree: dict[str, Any], model: type[BaseModel], folder: Path) -> None:
    for name, field in model.model_fields.items():
        value, kind = tree.get(name), field.annotation
        if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
            _anchor(value, kind, folder)
        elif isinstance(value, str) and (kind is Path or Path in typing.get_args(kind)):
            tree[name] = str(folder / Path(value).expanduser())


def _put(tree: dict[str, Any], dotted: str, value: Any, *, source: str) -> None:
    *parents, leaf = dotted.split(".")
    for depth, parent in enumerate(parents, 1):
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"{source}: there is no {dotted}: {'.'.join(parents[:depth])} is a value here, not a section"
            )
        tree = child
    tree[leaf] = value


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _source(error: Any, sources: Mapping[str, str], path: Path | None) -> str:
    """What the user wrote the value of `error` with, as the beginning of a message."""
    at = ".".join(str(part) for part in error["loc"]) + "."
    names = [name for key, name in sources.items() if at.startswith(f"{key}.") or f"{key}.".startswith(at)]
    if names:
        return f"{', '.join(names)}: "
    return f"{path}: " if path is not None else ""


def _explain(error: Any) -> str:
    loc = [str(part) for part in error["loc"]]
    key = ".".join(loc)
    if error["type"] == "extra_forbidden":
        names = _keys_at(loc[:-1])
        near = difflib.get_close_matches(loc[-1], names, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*loc[:-1], near[0]])}?" if near else f"known: {', '.join(names)}"
        return f"unknown key {key}; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key} = {error.get('input')!r}: {message[0].lower()}{message[1:]}"


def _keys_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        field = model.model_fields.get(part)
        kind = field.annotation if field is not None else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return []
        model = typing.cast(type[BaseModel], kind)
    return sorted(model.model_fields)
