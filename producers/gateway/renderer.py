"""What turns a conversation into token ids: the interface of the two renderers, and what both refuse.

A session calls `open` for a conversation that it has no tokens of, and `extend` for what comes after a turn that
was sampled. Nothing that was sampled is ever given to a renderer to be encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...schemas.errors import HeadraceError
from .messages import Message, Tool


class RenderError(HeadraceError, ValueError):
    """A conversation that has no token form in this model; the message says which part. The client's mistake."""


class ExtensionError(HeadraceError):
    """It cannot be proven that the new messages only append to the tokens that are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What was said before the new messages, for renderers that need it; read only when called."""

    messages: Callable[[], Sequence[Message]]
    """All messages up to and including the answer that was sampled last."""
    tools: Sequence[Tool]


class Renderer(Protocol):
    """Messages and tools -> ids of one model. Pure: the same ids for the same messages."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids at which the model ends its turn."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """A whole conversation up to where the assistant speaks. RenderError."""

    def close(self, sampled: Sequence[int]) -> list[int]:
        """What must stand between a sampled turn and the next message: open blocks and the turn are closed where
        the model has not closed them, then whatever the template writes between turns."""

    def extend(self, past: Past, new: Sequence[Message]) -> list[int]:
        """What follows `close`: the new messages, up to where the assistant speaks. RenderError, ExtensionError."""
