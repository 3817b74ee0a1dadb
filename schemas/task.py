"""`task/1`: what to solve: the prompt, the environment, how to score it, and for which split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from .codec import RecordType, member, require
from .trajectory import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task; the rollouts of one pass over it form a group."""

    task_id: str
    policy_id: str
    split: Split = Split.TRAIN
    prompt: str | None = None
    """Raw text, tokenized as it stands. Exactly one of `prompt` and `messages` is set."""
    messages: str | None = None
    """JSON list of {role, content}, rendered with the model's chat template."""
    environment: str | None = None
    """Built-in name or `module:attr`; None: the configured default."""
    environment_args: str | None = None
    """JSON object."""
    reward_spec: str | None = None
    """JSON {"name": ..., "args": {...}}; None: the configured default."""
    group_size: int | None = None
    """Rollouts per group; None: the configured default."""
    max_tokens: int | None = None
    """Limit of one turn; None: the configured default."""
    metadata: str | None = None
    """Free-form JSON."""


TASK_SCHEMA = pa.schema(
    [
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("policy_id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),
        pa.field("messages", pa.string()),
        pa.field("environment", pa.string()),
        pa.field("environment_args", pa.string()),
        pa.field("reward_spec", pa.string()),
        pa.field("group_size", pa.int32()),
        pa.field("max_tokens", pa.int32()),
        pa.field("metadata", pa.string()),
    ]
)


def check_task(t: Task) -> None:
    """Raise InvalidMessageError where a task breaks an invariant."""
    require(bool(t.task_id and t.policy_id), "missing_id", "an id is empty")
    require((t.prompt is None) != (t.messages is None), "prompt", "set exactly one of prompt and messages")
    require(t.prompt != "", "prompt", "the prompt is empty")
    require(t.group_size is None or t.group_size >= 1, "group_size", f"{t.group_size}")
    require(t.max_tokens is None or t.max_tokens >= 1, "max_tokens", f"{t.max_tokens}")
    for name in ("messages", "environment_args", "reward_spec", "metadata"):
        check_json(name, getattr(t, name))


def check_json(name: str, text: str | None) -> None:
    """Raise InvalidMessageError(`name`) unless `text` is None or JSON."""
    if text is None:
        return
    try:
        json.loads(text)
    except (ValueError, RecursionError) as e:
        require(False, name, f"not JSON: {e}")


def _to_row(t: Task) -> dict[str, Any]:
    return {name: getattr(t, name) for name in TASK_SCHEMA.names} | {"split": t.split.value}


def _from_row(row: Mapping[str, Any]) -> Task:
    return Task(**{**row, "split": member(Split, row["split"], "split")})


TASK: RecordType[Task] = RecordType(
    name="task", major=1, schema=TASK_SCHEMA, to_row=_to_row, from_row=_from_row, check=check_task
)
