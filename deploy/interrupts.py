"""Ctrl-C and SIGTERM: the first raises Interrupted once, every later one only asks the clean-up to hurry.

So the clean-up itself is never interrupted, and a second Ctrl-C still has an effect.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any


class Interrupted(BaseException):
    """The user or the system asked this process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_status(self) -> int:
        """As shells report it."""
        return 128 + self.signum


@dataclass(slots=True)
class _Shield:
    depth: int = 0
    held: int | None = None
    """The signal that came meanwhile."""


_shield = _Shield()


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """What is inside happens whole: an interruption that comes meanwhile is raised at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _shield.depth += 1
    try:
        yield
    finally:
        _shield.depth -= 1
        if _shield.depth == 0 and _shield.held is not None:
            held, _shield.held = _shield.held, None
            signal.raise_signal(held)


class Interrupts:
    """A context in which the main thread gets Interrupted."""

    def __init__(self) -> None:
        self.count = 0
        self._closing = False
        self._former: dict[int, Any] = {}

    def hurry(self) -> bool:
        """True when asked to end while the clean-up was running."""
        return self.count > 1

    def closing(self) -> None:
        """The clean-up begins: from here on nothing is raised."""
        self._closing = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if _shield.depth:
            _shield.held = signum
            return
        self.count += 1
        if not self._closing:
            self._closing = True
            raise Interrupted(signum)
        # A signal that comes after a normal end began is the first, and still means: faster.
        self.count = max(self.count, 2)

    def __enter__(self) -> Interrupts:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._former[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)
