"""Where progress goes: a live panel in a terminal, plain lines elsewhere, standard error when stdout is for JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live

from .history import History
from .supervisor import Role
from .view import progress_line, run_view

REFRESH_SECONDS = 0.5
LINE_SECONDS = 5.0
"""Between two progress lines."""


class Screen:
    """A context; `phase` and `refresh` are cheap and may be called often."""

    def __init__(self, title: str, about: str = "", *, started: float, quiet: bool) -> None:
        """`started`: monotonic seconds; `quiet`: keep standard output free."""
        self._title, self._about, self._started = title, about, started
        self._console = Console(file=sys.stderr if quiet else sys.stdout, soft_wrap=True)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._phase = ""
        self._shown = 0.0
        self.history = History()
        self.roles: Callable[[], Sequence[Role]] = list

    def phase(self, text: str) -> None:
        """What is being done now."""
        if text == self._phase:
            self.refresh(grew=False)
            return
        self._phase = text
        if self._live is None:
            self._console.print(f"{self._seconds():6.1f} s  {text}", markup=False, highlight=False)
        self._draw()

    def sampling(self, text: str) -> None:
        """How the first batch fills: in place in a terminal, elsewhere a line now and then."""
        now = time.monotonic()
        if self._live is not None:
            self._phase = text
        elif text != self._phase and now - self._shown > LINE_SECONDS:
            self._shown = now
            self.phase(text)

    def tell(self, text: str) -> None:
        """A line that stays, in a terminal too."""
        self._console.print(f"{self._seconds():6.1f} s  {text}", markup=False, highlight=False)

    def refresh(self, *, grew: bool) -> None:
        """Show the present state, if the last look is long enough ago."""
        now = time.monotonic()
        if self._live is not None:
            if now - self._shown > REFRESH_SECONDS:
                self._draw()
        elif grew and now - self._shown > LINE_SECONDS:
            self._shown = now
            line = progress_line(self.history, seconds=self._seconds())
            self._console.print(line, markup=False, highlight=False)

    def _draw(self) -> None:
        if self._live is not None:
            self._shown = time.monotonic()
            view = run_view(
                self._title, self.history, self.roles(), seconds=self._seconds(), phase=self._phase
            )
            self._live.update(view, refresh=True)

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> Screen:
        # The live view has the title on its frame.
        title = self._title if self._live is None else ""
        for line in filter(None, (title, self._about)):
            self._console.print(line, markup=False, highlight=False, soft_wrap=self._live is None)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._draw()
            self._live.stop()
