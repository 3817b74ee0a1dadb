"""A renderer and its vocabulary as one: what the gateway knows of the model that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .messages import Message, Tool
from .renderer import Past, Renderer
from .renderer_text import TextEncoder

_GENERATION_PROMPT = 8
"""Tokens at the end of a prompt among which an opened reasoning block is looked for."""


class ChatModel:
    """Renders, and spells what was sampled."""

    def __init__(self, renderer: Renderer, text: TextEncoder) -> None:
        self._renderer, self._text = renderer, text
        self._think = text.control.get("<think>")
        self._thought = text.control.get("</think>")

    @property
    def control(self) -> Mapping[str, int]:
        """Added tokens by their text."""
        return self._text.control

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which the model ends its turn."""
        return self._renderer.stop_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._renderer.vocab_size

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """A whole conversation up to where the assistant speaks. RenderError."""
        return self._renderer.open(messages, tools)

    def close(self, sampled: Sequence[int]) -> list[int]:
        """What must stand between a sampled turn and the next message."""
        return self._renderer.close(sampled)

    def extend(self, past: Past, new: Sequence[Message]) -> list[int]:
        """What follows `close`. RenderError, ExtensionError."""
        return self._renderer.extend(past, new)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens spelled out."""
        return self._text.decode(ids)

    def text_ids(self, text: str) -> list[int]:
        """A raw prompt, in which control tokens are text. RenderError."""
        return self._text.encode([text])

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block."""
        for i in reversed(prompt[-_GENERATION_PROMPT:]):
            if i == self._thought:
                return False
            if i == self._think:
                return True
        return False
