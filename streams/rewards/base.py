"""What a reward function is: a callable from a rollout to a number, plain Python, sync or async.

    def my_reward(rollout: RolloutView) -> float | dict | RewardResult

A dict holds `reward` and further named components. An exception voids the rollout: it is not trained and does
not enter its group's baseline. A policy that failed by your own rule is `RewardResult.failure("why")`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from ...schemas.errors import RewardError
from ...schemas.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Message:
    """One piece of the episode's text."""

    role: str
    """`user` (or `system`): the prompt; `assistant`: sampled, special tokens kept; `tool`: the environment."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """What a reward function sees of a rollout."""

    task_id: str
    rollout_id: str
    messages: tuple[Message, ...]
    args: Mapping[str, Any] = field(default_factory=dict)
    """Of the reward spec: the task's own, or the configured default."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free-form, from whoever produced the trajectory."""
    status: str = "completed"
    stop_reason: str = "stop"
    """Of the last turn: `stop`, `length`, or the environment's word."""

    @property
    def answer(self) -> str:
        """The last assistant message; empty if there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")

    def arg(self, name: str) -> Any:
        """An argument that the reward spec must have; RewardError `reward_args` without it."""
        try:
            return self.args[name]
        except KeyError:
            raise RewardError("reward_args", f"the reward spec has no argument {name!r}") from None


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward with its components, or a failure of the policy."""

    value: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[float, ...] | None = None
    """[turns] a reward of each turn; their sum is the rollout's reward."""
    failed: str | None = None
    """Why the policy failed: the rollout gets verify.failure_reward and is trained."""

    @classmethod
    def failure(cls, reason: str) -> RewardResult:
        """The policy's output cannot be scored, by rule."""
        return cls(None, failed=reason)


RewardReturn = float | Mapping[str, Any] | RewardResult


class Reward(Protocol):
    """A reward function."""

    def __call__(self, rollout: RolloutView, /) -> RewardReturn | Awaitable[RewardReturn]:
        """The rollout's reward. May raise anything: the rollout is void then."""


def view_of(trajectory: Trajectory, args: Mapping[str, Any]) -> RolloutView:
    """The trajectory as a reward sees it; RewardError `no_messages` where its text is missing or broken."""
    return RolloutView(
        task_id=trajectory.task_id,
        rollout_id=trajectory.rollout_id,
        messages=_messages(trajectory.messages),
        args=args,
        metadata=_metadata(trajectory.metadata),
        status=trajectory.status.value,
        stop_reason=trajectory.stop_reason,
    )


def result_of(returned: Any) -> RewardResult:
    """What a reward function returned, checked. Raises RewardError `reward_not_number` or `reward_not_finite`.

    With a reward for each turn and none for the whole, that is their sum.
    """
    if isinstance(returned, RewardResult):
        if returned.failed is not None:
            return returned
        result = returned
    elif isinstance(returned, Mapping):
        named = dict(returned)
        result = RewardResult(named.pop("reward", None), turns=named.pop("turns", None), components=named)
    else:
        result = RewardResult(returned)
    turns = _turns(result.turns)
    return RewardResult(
        math.fsum(turns) if turns is not None and result.value is None else _number("reward", result.value),
        {k: _number(k, v) for k, v in result.components.items()},
        turns,
    )


def _turns(given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise RewardError("reward_not_number", f"turns is a {type(given).__name__}, not a list of numbers")
    return tuple(_number(f"turns[{i}]", value) for i, value in enumerate(given))


def _number(name: str, value: Any) -> float:
    if not isinstance(value, Real):
        raise RewardError("reward_not_number", f"{name} is a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError("reward_not_finite", f"{name} is {number}")
    return number


def _messages(text: str | None) -> tuple[Message, ...]:
    try:
        return tuple(Message(str(m["role"]), _text(m.get("content"))) for m in json.loads(text or ""))
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise RewardError("no_messages", f"the trajectory's messages cannot be read: {e}") from None


def _text(content: Any) -> str:
    """Plain content, or the text parts of structured content."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def _metadata(text: str | None) -> Mapping[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
