"""A task file (JSON Lines) -> Task records -> the tasks topic. An error names file, line, field and the fix.

{"id": "t1", "messages": [{"role": "user", "content": "2+2?"}],
 "reward": {"name": "exact_match", "args": {"answer": "4"}}, "group_size": 8, "split": "train"}
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..schemas.codec import SCHEMA_HEADER
from ..schemas.errors import BrokerError, ConfigError, InvalidMessageError
from ..schemas.task import TASK, Task
from ..schemas.trajectory import Split

FIELDS = (
    "id",
    "prompt",
    "messages",
    "environment",
    "environment_args",
    "reward",
    "group_size",
    "max_tokens",
    "split",
    "metadata",
)


def read_tasks(path: Path, *, policy_id: str) -> list[Task]:
    """The tasks in `path`, in its order; blank lines are left out. ConfigError for the first line that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"the task file {path} does not exist; `headrace init` writes one to start from"
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"the task file {path} cannot be read: {e}") from None
    tasks: dict[str, Task] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        task = _task(_object(line, where), where, number, policy_id)
        if task.task_id in tasks:
            raise ConfigError(
                f'{where}, field "id": {task.task_id!r} is taken by an earlier line; use another'
            )
        tasks[task.task_id] = task
    if not any(task.split is Split.TRAIN for task in tasks.values()):
        raise ConfigError(f'{path} has no task to train on: add lines with "messages" or "prompt"')
    return list(tasks.values())


def _object(line: str, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where} is not JSON ({e}): write one JSON object a line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a JSON object: write one JSON object a line")
    for key in value:
        if key not in FIELDS:
            near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(FIELDS)}"
            raise ConfigError(f"{where}: unknown field {key!r}; {hint} (your own data goes under 'metadata')")
    return value


def _task(row: Mapping[str, Any], where: str, number: int, policy_id: str) -> Task:
    def field(name: str, ok: Callable[[Any], bool], should_be: str) -> Any:
        value = row.get(name)
        if value is not None and not ok(value):
            raise ConfigError(f'{where}, field "{name}": {json.dumps(value)[:80]} should be {should_be}')
        return value

    if (row.get("prompt") is None) == (row.get("messages") is None):
        raise ConfigError(f'{where}: write exactly one of "messages" (chat) and "prompt" (raw text)')
    identity = field("id", lambda v: isinstance(v, str | int) and str(v) != "", "a text or a number")
    split = field("split", lambda v: v in tuple(Split), '"train" or "eval"')
    return Task(
        task_id=str(identity) if identity is not None else f"line-{number}",
        policy_id=policy_id,
        split=Split(split) if split is not None else Split.TRAIN,
        prompt=field("prompt", lambda v: isinstance(v, str) and v != "", "a text that is not empty"),
        messages=_json(
            field("messages", _are_messages, 'a list of {"role": ..., "content": ...}, not empty')
        ),
        environment=field("environment", lambda v: isinstance(v, str), "a built-in name or module:attr"),
        environment_args=_json(field("environment_args", lambda v: isinstance(v, dict), "an object")),
        reward_spec=_reward(
            field("reward", _is_reward, 'a name, or {"name": "exact_match", "args": {"answer": "4"}}')
        ),
        group_size=field("group_size", _is_count, "a whole number from 1 on"),
        max_tokens=field("max_tokens", _is_count, "a whole number from 1 on"),
        metadata=_json(field("metadata", lambda v: isinstance(v, dict), "an object")),
    )


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _is_reward(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("args", {}), dict)
        and not set(value) - {"name", "args"}
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _reward(value: Any) -> str | None:
    return _json({"name": value} if isinstance(value, str) else value)


def publish_tasks(producer: Any, topic: str, tasks: Iterable[Task], *, present: Mapping[bytes, bytes]) -> int:
    """Send what is not on the topic already (`present`: key -> newest value); returns how many were sent."""
    sent = []
    for task in tasks:
        try:
            value = TASK.encode(task)
        except InvalidMessageError as e:
            raise ConfigError(f"task {task.task_id!r} cannot be used: {e}") from None
        key = task.task_id.encode()
        if present.get(key) != value:
            sent.append(producer.send(topic, value, key=key, headers=[(SCHEMA_HEADER, TASK.tag.encode())]))
    for future in sent:
        try:
            future.get(30)
        except Exception as e:
            raise BrokerError(f"a task could not be published: {e}") from e
    return len(sent)
