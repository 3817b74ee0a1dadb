"""A conversation as all three wire formats mean it: what the APIs parse into and the renderer reads.

Whatever a client sends is kept here as it was sent (tool arguments as text, key order of schemas); comparing
messages of two requests is the session tree's work, on normalised forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool that the assistant asks for."""

    id: str
    name: str
    arguments: str
    """JSON text, byte for byte."""
    namespace: str | None = None
    """Codex nests tools in namespaces; `name` is then already the qualified one, as the model sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message."""

    role: Role
    text: str = ""
    """All text blocks, joined."""
    reasoning: str | None = None
    """What an assistant thought before; None where the client dropped it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Of a tool's answer: the call that it answers."""
    handle: str | None = None
    """The opaque mark that an earlier response put there (encrypted_content, signature), where it came back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema, in the client's key order."""
    namespace: str | None = None
    """Codex nests tools in namespaces; `name` is then already the qualified one, as the model sees it."""
    free_text: bool = False
    """A custom tool of the Responses API: the model fills the one argument `input`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next turn is sampled."""

    max_tokens: int | None = None
    """None: what the context allows."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to a model, whatever API it came by."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = Sampling()
    stream: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = False
    """Of a chat or completions stream: end with a usage chunk."""
    tool_choice: str = "auto"
    """`none`: tools stay in the prompt, and calls in the answer are given as text."""
    prompt: str | tuple[int, ...] | None = None
    """Of the completions API: what to continue instead of a conversation (`messages` is empty then)."""
    echo: bool = False
    """Of the completions API: the answer begins with the prompt."""
