"""Plain text -> ids, in which nothing that a user or a tool wrote ever becomes a control token.

Control tokens are all added tokens of the vocabulary, marked as special or not (`<tool_call>`, `<think>`). Each run
of text between two of them is encoded by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from .renderer import RenderError

Part = str | int
"""Text that must stay text, or the id of a control token."""


class TextEncoder:
    """Encodes with one `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`, or a fast tokenizer of transformers around one."""
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.control: dict[str, int] = {token.content: i for i, token in added.items()}
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        texts = sorted((t for t in self.control if len(t) > 1), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._control_ids = frozenset(i for text, i in self.control.items() if len(text) > 1)

    def marker(self, text: str) -> Part:
        """The control token spelled so; where the vocabulary has none, the template writes it as text."""
        return self.control.get(text, text)

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Neighbouring texts are encoded as one, as the template's output would be. RenderError."""
        ids: list[int] = []
        run: list[str] = []
        for part in parts:
            if isinstance(part, str):
                run.append(part)
                continue
            if run:
                self._append(ids, "".join(run))
                run.clear()
            ids.append(part)
        if run:
            self._append(ids, "".join(run))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _append(self, ids: list[int], text: str) -> None:
        for piece in self._pieces(text):
            try:
                found = self._tokenizer.encode(piece, add_special_tokens=False).ids
            except Exception as e:  # the library raises plain Exception, TypeError for lone surrogates
                raise RenderError(f"text that the vocabulary cannot encode: {piece[:80]!r}: {e}") from None
            if not self._control_ids.isdisjoint(found):
                raise RenderError(f"text that has no ordinary form in this vocabulary: {piece[:80]!r}")
            ids.extend(found)

    def _pieces(self, text: str) -> Iterator[str]:
        """`text` in parts that spell no control token: each that is spelled is cut after its first character."""
        start = 0
        while self._spelled is not None and (match := self._spelled.search(text, start)):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        if start < len(text):
            yield text[start:]
