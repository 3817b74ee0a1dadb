"""The tasks of one policy as the topic tells them, handed out in shuffled passes.

A task published again replaces the earlier one, a tombstone removes it; what arrives during a pass joins the
next one. Eval tasks are kept apart and never handed out for training.
"""

from __future__ import annotations

import random

from ...schemas.task import Task
from ...schemas.trajectory import Split


class TaskPool:
    """Train tasks in an order that depends on the seed and the pass alone."""

    def __init__(self, policy_id: str, seed: str) -> None:
        self._policy_id = policy_id
        self._seed = seed
        self._train: dict[str, Task] = {}
        self._eval: dict[str, Task] = {}
        self._pending: list[str] = []
        self.passes = 0
        """Passes begun."""

    def begin_at(self, version: int) -> None:
        """Shuffle by the version at the start too: a worker that is started again begins with other tasks."""
        if version:
            self._seed += f":{version}"

    def __len__(self) -> int:
        return len(self._train)

    @property
    def eval_tasks(self) -> list[Task]:
        """Tasks that are for measuring only."""
        return list(self._eval.values())

    def put(self, task: Task) -> None:
        """A task record; those of other policies are left out."""
        if task.policy_id != self._policy_id:
            return
        self.remove(task.task_id)
        (self._train if task.split is Split.TRAIN else self._eval)[task.task_id] = task

    def remove(self, task_id: str) -> None:
        """A tombstone, or a task that turned out to be unusable."""
        self._train.pop(task_id, None)
        self._eval.pop(task_id, None)

    def next(self) -> Task | None:
        """The next task to train on; None while there is none."""
        while self._train:
            while self._pending:
                task = self._train.get(self._pending.pop())
                if task is not None:
                    return task
            self._pending = sorted(self._train)
            random.Random(f"{self._seed}:{self.passes}").shuffle(self._pending)
            self.passes += 1
        return None
