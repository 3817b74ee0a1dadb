"""Sampled ids -> text as it can be said: whole characters only, and control tokens apart from text that spells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MOST_HELD = 12
"""Tokens that may wait for the rest of a character."""
_BROKEN = "\ufffd"


class Vocabulary(Protocol):
    """Ids and their text."""

    @property
    def control(self) -> Mapping[str, int]:
        """Added tokens by their text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out."""


@dataclass(frozen=True, slots=True)
class Spelled:
    """Text, or one of MARKS where `mark` is true."""

    text: str
    mark: bool = False


class Marks:
    """Which ids are marks, and which are control tokens that a client never sees. Made once for a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.by_id = {i: t for t in MARKS if (i := vocabulary.control.get(t)) is not None}
        self.as_text = tuple(t for t in MARKS if t not in vocabulary.control)
        """Those that this vocabulary writes as ordinary text."""
        shown = ("<tool_response>", "</tool_response>")
        self.hidden = frozenset(
            i for t, i in vocabulary.control.items() if len(t) > 1 and i not in self.by_id and t not in shown
        )


class Speller:
    """The text of one answer, token by token."""

    def __init__(self, vocabulary: Vocabulary, marks: Marks) -> None:
        self._vocabulary, self._marks = vocabulary, marks
        # Decoders may treat the beginning of a text in their own way, so some said tokens stay in front.
        self._said: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> list[Spelled]:
        """What can be said after `token`."""
        mark = self._marks.by_id.get(token)
        if mark is None and token not in self._marks.hidden:
            self._held.append(token)
            text = self._text()
            if text.endswith(_BROKEN) and len(self._held) < MOST_HELD:
                return []
            self._said, self._held = [*self._said, *self._held][-4:], []
            return [Spelled(text)] if text else []
        spelled = self.end()
        if mark is not None:
            spelled.append(Spelled(mark, mark=True))
        return spelled

    def end(self) -> list[Spelled]:
        """What is left, broken characters replaced."""
        text = self._text() if self._held else ""
        self._said, self._held = [], []
        return [Spelled(text)] if text else []

    def _text(self) -> str:
        if not self._said:
            return self._vocabulary.decode(self._held)
        before = self._vocabulary.decode(self._said)
        return self._vocabulary.decode([*self._said, *self._held])[len(before) :]
