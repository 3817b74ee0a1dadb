"""Who holds an engine's pause: an update, an operator, or both. Tokens flow while nobody does.

An operator's pause outlives updates: they are applied inside it, and it ends when the operator says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from .protocol import Engine


class Pauses:
    """The pause of one engine. Thread-safe; a call waits while an update is being applied."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._operators: AbstractContextManager[None] | None = None

    @property
    def held(self) -> bool:
        """True while an operator holds it."""
        return self._operators is not None

    def hold(self) -> None:
        """An operator's pause begins, after the step that is running. Idempotent."""
        with self._lock:
            if self._operators is None:
                pause = self._engine.paused()
                pause.__enter__()
                self._operators = pause

    def release(self) -> None:
        """The operator's pause ends. Idempotent."""
        with self._lock:
            pause, self._operators = self._operators, None
            if pause is not None:
                pause.__exit__(None, None, None)

    @contextmanager
    def for_update(self) -> Iterator[bool]:
        """No token is sampled inside the block; True: it is this block that stops them."""
        with self._lock:
            if self._operators is not None:
                yield False
                return
            with self._engine.paused():
                yield True

    @contextmanager
    def unchanged(self) -> Iterator[bool]:
        """Whether an operator holds the engine, which stays so inside the block."""
        with self._lock:
            yield self._operators is not None
