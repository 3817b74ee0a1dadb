"""Text that may turn into something else is held back: the beginning of a stop string or of a mark."""

from __future__ import annotations

from collections.abc import Sequence


class Finder:
    """Finds the first of some texts in a stream of text, and says what surely comes before it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._longest = max((len(t) for t in texts), default=0)
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that is out of doubt, the text found after it). What follows the find stays in `held`."""
        if not self._texts:
            return text, None
        held = self.held + text
        best: tuple[int, int, str] | None = None
        for t in self._texts:
            at = held.find(t)
            # Of two that begin at one place the shorter was complete first.
            if at >= 0 and (best is None or (at + len(t), at) < (best[1], best[0])):
                best = (at, at + len(t), t)
        if best is not None:
            self.held = held[best[1] :]
            return held[: best[0]], best[2]
        keep = self._doubtful(held)
        self.held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def rest(self) -> str:
        """What was held, at the end."""
        text, self.held = self.held, ""
        return text

    def _doubtful(self, text: str) -> int:
        """Length of the longest end of `text` with which one of the texts begins."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(t.startswith(end) for t in self._texts):
                return size
        return 0
