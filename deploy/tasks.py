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
    "task_id",
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
    return list(numbered_tasks(path, policy_id=policy_id).values())


def numbered_tasks(path: Path, *, policy_id: str) -> dict[int, Task]:
    """As `read_tasks`, by line number."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"the task file {path} does not exist; `headrace init` writes one to start from"
        ) from None
    except OSError as e:
        raise ConfigError(f"the task file {path} cannot be read: {e}") from None
    tasks: dict[int, Task] = {}
    taken: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        row = _object(line, where)
        task = _task(row, where, number, policy_id)
        if task.task_id in taken:
            raise ConfigError(
                f'{where}, field "{_id_field(row)}": {task.task_id!r} is taken by an earlier line; use another'
            )
        taken.add(task.task_id)
        tasks[number] = task
    if not any(task.split is Split.TRAIN for task in tasks.values()):
        raise ConfigError(f'{path} has no task to train on: add lines with "messages" or "prompt"')
    return tasks


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as e:
        raise ConfigError(
            f"{where} is not UTF-8: byte {line[e.start]:#04x} at position {e.start + 1} of the line ({e.reason}); "
            "save the file as UTF-8"
        ) from None
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
    if row.get("id") is not None and row.get("task_id") is not None:
        raise ConfigError(f'{where}: "id" and "task_id" are the same field; write one of them')
    identity = field(
        _id_field(row), lambda v: isinstance(v, str | int) and str(v) != "", "a text or a number"
    )
    split = field("split", lambda v: v in tuple(Split), '"train" or "eval"')
    return Task(
        task_id=str(identity) if identity is not None else f"line-{number}",
        policy_id=policy_id,
        split=Split(split) if split is not None else Split.TRAIN,
        prompt=field("prompt", lambda v: isinstance(v, str) and v != "", "a text that is not empty"),
        messages=_messages(
            field("messages", _is_list, 'a list of {"role": ..., "content": ...}, not empty'), where
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


def _id_field(row: Mapping[str, Any]) -> str:
    return "task_id" if row.get("task_id") is not None else "id"


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _messages(value: list[Any] | None, where: str) -> str | None:
    for number, message in enumerate(value or (), 1):
        which = f'{where}, field "messages", message {number}'
        if not isinstance(message, dict):
            raise ConfigError(
                f'{which}: {json.dumps(message)[:80]} should be {{"role": ..., "content": ...}}'
            )
        for key in ("role", "content"):
            if key not in message:
                near = difflib.get_close_matches(key, message, n=1, cutoff=0.5)
                has = ", ".join(json.dumps(k) for k in message) or "nothing"
                hint = f'is "{near[0]}" meant to be "{key}"?' if near else f"it has {has[:80]}"
                raise ConfigError(f'{which} has no "{key}": {hint}')
        if not isinstance(message["role"], str):
            raise ConfigError(
                f'{which}: "role" is {json.dumps(message["role"])[:80]}; it should be a text, such as "user"'
            )
    return _json(value)


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
