"""One turn of the policy, then over: question and answer."""

from __future__ import annotations

from collections.abc import Sequence

from ...schemas.task import Task
from .base import Observation


class SingleTurn:
    """The default environment."""

    def start(self, task: Task) -> Observation | None:
        """Nothing beyond the task's prompt."""
        return None

    def step(self, text: str, token_ids: Sequence[int]) -> Observation | None:
        """Over after the first turn."""
        return None
