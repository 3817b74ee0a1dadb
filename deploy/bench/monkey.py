"""Who is hurt next, when and how: a seeded plan without clock or processes of its own.

Never a second broker node while the cluster has not all replicas back: what is promised holds while one is lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How it behaves."""

    pause_s: tuple[float, float] = (1.5, 5.5)
    """Between two blows."""
    freeze_share: float = 0.1
    """Of the blows that stop a process instead of killing it."""
    freeze_s: float = 10.0
    node_share: float = 0.3
    """Of the blows that go to a broker node, where one may be hurt."""


@dataclass(frozen=True, slots=True)
class Blow:
    """What to do to whom."""

    kind: Literal["kill", "freeze", "thaw"]
    name: str


class Monkey:
    """Asked with the time and who is there; answers with what to do now."""

    def __init__(self, seed: int, *, habits: Habits = Habits(), now: float = 0.0) -> None:
        self._random, self._habits = random.Random(seed), habits
        self._next = now + self._pause()
        self._frozen: dict[str, float] = {}
        """Name -> when it goes on."""

    @property
    def frozen(self) -> frozenset[str]:
        """Who is stopped."""
        return frozenset(self._frozen)

    def blows(self, now: float, roles: Sequence[str], nodes: Callable[[], Sequence[str]]) -> list[Blow]:
        """Due at `now`. `roles`: live role processes; `nodes()`: broker nodes, empty while none may be hurt."""
        due = [Blow("thaw", name) for name, until in self._frozen.items() if now >= until]
        for blow in due:
            del self._frozen[blow.name]
        if now >= self._next:
            self._next = now + self._pause()
            chosen = self._choose(now, roles, nodes())
            due += [chosen] if chosen is not None else []
        return due

    def _choose(self, now: float, roles: Sequence[str], nodes: Sequence[str]) -> Blow | None:
        # Drawn whether used or not: the same seed goes on alike when a node was away.
        at_node, freeze = self._random.random(), self._random.random()
        free = [] if self._frozen.keys() & set(nodes) else sorted(nodes)
        targets = free if free and at_node < self._habits.node_share else sorted(roles)
        if not targets:
            return None
        name = self._random.choice(targets)
        if freeze < self._habits.freeze_share and name not in self._frozen:
            self._frozen[name] = now + self._habits.freeze_s
            return Blow("freeze", name)
        self._frozen.pop(name, None)
        return Blow("kill", name)

    def _pause(self) -> float:
        return self._random.uniform(*self._habits.pause_s)
