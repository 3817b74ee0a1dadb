"""An example environment: a guess that is wrong gets a hint and a second turn.

One object is built for each rollout, with `rollout.environment_args` (and the task's own) as keywords. `start` is
called once, `step` after each turn of the model until it returns None. Both may be async. A sync one may block:
it runs in a thread of its own, and a call that takes over `rollout.environment_seconds` aborts the rollout. An
exception aborts it too (it is not trained): raise for broken infrastructure only.

To use it: environment = "environment:SecondChance" in headrace.toml, or in a line of tasks.jsonl.
"""

import json
from collections.abc import Sequence

from headrace.producers.environments.base import Observation
from headrace.schemas.task import Task


class SecondChance:
    """Two turns at most. `task.metadata` is the task's, as JSON text."""

    def __init__(self, hint: str = "That is not it. Try once more, with one word.") -> None:
        self.stop_reason: str | None = None  # optional: why the episode is over; the reward sees it
        self._hint = hint
        self._wanted = ""
        self._turns = 0

    def start(self, task: Task) -> Observation | None:
        """Called before the first turn; an observation returned here is appended to the prompt."""
        self._wanted = str(json.loads(task.metadata or "{}").get("wanted", "")).lower()
        return None

    def step(self, text: str, token_ids: Sequence[int]) -> Observation | None:
        """`text` is what the model wrote. What is returned is read by the model and masked from the loss."""
        self._turns += 1
        if self._wanted in text.lower():
            self.stop_reason = "right"
            return None
        if self._turns == 2:
            self.stop_reason = "wrong_twice"
            return None
        # For tasks with `messages`; for raw prompts return Observation(text="...").
        return Observation(messages=({"role": "user", "content": self._hint},))
