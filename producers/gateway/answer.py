"""What a turn says, piece by piece and as a whole, and what an API's writer makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import RequestError
from .messages import Call, Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token for clients that ask for log-probabilities."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """More text of the answer of choice `index`."""

    index: int
    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """More of its reasoning."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A tool call, whole."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of choice `index`."""

    index: int
    finish_reason: str
    """`stop` or `length`."""
    stop_text: str | None = None
    """The stop string that ended it."""
    tokens: tuple[TokenLogprob, ...] = ()
    """Those that no Text brought."""


Event = Text | Reasoning | Called | Done


@dataclass(slots=True)
class Answer:
    """The events of one choice, added up."""

    text: str = ""
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_text: str | None = None

    def add(self, event: Event) -> None:
        """Take in the next event."""
        match event:
            case Text():
                self.text += event.text
                self.tokens += event.tokens
            case Reasoning():
                self.reasoning = (self.reasoning or "") + event.text
            case Called():
                self.calls.append(event.call)
            case Done():
                self.finish_reason, self.stop_text = event.finish_reason, event.stop_text
                self.tokens += event.tokens

    def message(self, handle: str | None = None) -> Message:
        """As a message of the conversation."""
        return Message(
            role=Role.ASSISTANT,
            text=self.text,
            reasoning=self.reasoning,
            tool_calls=tuple(self.calls),
            handle=handle,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts."""

    prompt: int
    completion: int
    reasoning: int = 0

    @property
    def total(self) -> int:
        """Of both."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a response says of itself."""

    id: str
    """Without the API's prefix."""
    created: int
    """Unix seconds."""
    call: Call
    prompt_tokens: int
    echoed: str = ""
    """What the completions API says before the answer."""
    handles: tuple[str, ...] = ()
    """One per choice: the opaque mark that the client sends back with the turn."""

    def handle(self, index: int) -> str | None:
        """That of choice `index`."""
        return self.handles[index] if index < len(self.handles) else None


class Writer(Protocol):
    """Writes one response in one API's form. `begin` comes first, `end` or `failed` last."""

    def begin(self) -> bytes:
        """What a stream starts with."""

    def event(self, event: Event) -> bytes:
        """What an event adds to it; may be nothing."""

    def end(self, usage: Usage) -> bytes:
        """The end, after every choice is done."""

    def ping(self) -> bytes:
        """Keeps the connection in use."""

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that broke."""

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The response of a request without `stream`."""
