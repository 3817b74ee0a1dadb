"""Who holds an engine's pause: an update, an operator, or both. Tokens flow while nobody does.

An operator's pause outlives updates: they are applied inside it, and it ends when the operator says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .protocol import Engine


class Pauses:
    """The pause of one engine. Thread-safe; a call waits while an update is being applied."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._holder: _Holder | None = None

    @property
    def held(self) -> bool:
        """True while an operator holds it."""
        return self._holder is not None

    def hold(self) -> None:
        """An operator's pause begins, after the step that is running. Idempotent. Raises what the engine raises."""
        with self._lock:
            if self._holder is None:
                holder = _Holder(self._engine)
                holder.begin()
                self._holder = holder

    def release(self) -> None:
        """The operator's pause ends. Idempotent. Raises what the engine raises."""
        with self._lock:
            holder, self._holder = self._holder, None
            if holder is not None:
                holder.end()

    @contextmanager
    def for_update(self) -> Iterator[bool]:
        """No token is sampled inside the block; True: it is this block that stops them."""
        with self._lock:
            if self._holder is not None:
                yield False
                return
            with self._engine.paused():
                yield True

    @contextmanager
    def unchanged(self) -> Iterator[bool]:
        """Whether an operator holds the engine, which stays so inside the block."""
        with self._lock:
            yield self._holder is not None


class _Holder(threading.Thread):
    """Stands inside the engine's pause: engines may want the same thread to enter and to leave it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(name="operator-pause", daemon=True)
        self._engine = engine
        self._entered, self._leave = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Enter the pause."""
        self.start()
        self._entered.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Leave it."""
        self._leave.set()
        self.join()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """The pause, from its beginning to its end."""
        try:
            with self._engine.paused():
                self._entered.set()
                self._leave.wait()
        except BaseException as e:
            self._error = e
        finally:
            self._entered.set()
