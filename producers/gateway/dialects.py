"""The four APIs: how a request is read, how an answer is written, what an error looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .answer import Head, Writer
from .anthropic import AnthropicWriter
from .anthropic_request import parse_anthropic
from .chat import ChatWriter
from .chat_request import parse_chat
from .completions import CompletionsWriter
from .completions_request import parse_completions
from .errors import RequestError, anthropic_error, openai_error
from .messages import Call
from .reading import Fields
from .responses import ResponsesWriter
from .responses_request import parse_responses


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API."""

    name: str
    path: str
    parse: Callable[[Fields], Call]
    writer: Callable[[Head], Writer]
    error: Callable[[RequestError], dict[str, Any]]
    call_id: str
    """What ids of tool calls begin with."""


CHAT = Dialect(
    name="chat",
    path="/v1/chat/completions",
    parse=parse_chat,
    writer=ChatWriter,
    error=openai_error,
    call_id="call_",
)
RESPONSES = Dialect(
    name="responses",
    path="/v1/responses",
    parse=parse_responses,
    writer=ResponsesWriter,
    error=openai_error,
    call_id="call_",
)
ANTHROPIC = Dialect(
    name="messages",
    path="/v1/messages",
    parse=parse_anthropic,
    writer=AnthropicWriter,
    error=anthropic_error,
    call_id="toolu_",
)
COMPLETIONS = Dialect(
    name="completions",
    path="/v1/completions",
    parse=parse_completions,
    writer=CompletionsWriter,
    error=openai_error,
    call_id="call_",
)
DIALECTS = (CHAT, RESPONSES, ANTHROPIC, COMPLETIONS)


def error_shape(path: str) -> Callable[[RequestError], dict[str, Any]]:
    """How an error of a request to `path` is written; Anthropic's clients ask for /v1/messages only."""
    return anthropic_error if "/v1/messages" in path else openai_error
