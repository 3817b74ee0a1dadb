"""Rollouts of the completions API: a prompt that is text or ids as it stands, and what follows it.

No conversation, so nothing is matched: each request is a root of its session, and n answers to it are siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .capture import Plan, Session
from .messages import Call, Message, Role, Tool
from .renderer import ExtensionError, Past, Renderer
from .rows import Rollout


class _Verbatim:
    """A Renderer that is told the ids."""

    def __init__(self, model: Renderer) -> None:
        self.stop_ids, self.vocab_size = model.stop_ids, model.vocab_size
        self.prompt: tuple[int, ...] = ()

    def open(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The prompt as it stands."""
        return list(self.prompt)

    def close(self, sampled: Sequence[int]) -> list[int]:
        """Nothing: there is no next message."""
        return []

    def extend(self, past: Past, new: Sequence[Message]) -> list[int]:
        """Never."""
        raise ExtensionError("a raw prompt continues nothing")


class RawSession(Session):
    """A session of raw prompts."""

    def __init__(self, rollout: Rollout, model: Renderer, **settings: Any) -> None:
        self._verbatim = _Verbatim(model)
        super().__init__(rollout, self._verbatim, **settings)

    def begin_raw(self, prompt: tuple[int, ...], text: str, call: Call, **settings: Any) -> Plan:
        """As `begin`, for the prompt `prompt` that reads `text`."""
        self._verbatim.prompt = prompt
        asked = Call(
            model=call.model,
            messages=(Message(role=Role.USER, text=text),),
            sampling=call.sampling,
            stream=call.stream,
            logprobs=call.logprobs,
        )
        return self.begin(asked, **settings)
