"""A two-turn tool: the policy writes `[47+38]`, the environment appends `85>`, the policy answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...schemas.task import Task
from .base import Observation

_CALL = re.compile(r"\[(\d{1,18})([+*-])(\d{1,18})\]", re.ASCII)


class Calculator:
    """One call, one answer. A malformed call ends the episode, which the reward then judges as it stands."""

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self._called = False

    def start(self, task: Task) -> Observation | None:
        """Nothing beyond the task's prompt."""
        return None

    def step(self, text: str, token_ids: Sequence[int]) -> Observation | None:
        """The result of the call in the first turn; over after the second."""
        if self._called:
            return None
        self._called = True
        result = evaluate(text)
        if result is None:
            self.stop_reason = "malformed_call"
            return None
        return Observation(text=f"{result}>")


def evaluate(call: str) -> int | None:
    """The value of `[a+b]`, `[a-b]` or `[a*b]` over whole numbers; None for anything else."""
    match = _CALL.fullmatch(call)
    if match is None:
        return None
    a, operator, b = int(match[1]), match[2], int(match[3])
    if operator == "+":
        return a + b
    return a - b if operator == "-" else a * b
