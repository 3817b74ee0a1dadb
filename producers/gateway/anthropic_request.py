"""POST /v1/messages and /v1/messages/count_tokens: the body -> Call.

Messages stay where they are: a system message after the first user turn is rendered in place, tool results keep
the client's order, and cache_control is not part of what a message means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from .chat_request import BLOCKS_JOINED_BY, choice_of, sampling_of, text_of
from .messages import Call, Message, Role, Tool, ToolCall
from .reading import Fields

BILLING_LINE = "x-anthropic-billing-header:"
"""Claude Code's first system block starts with it; some releases put something new there in every request."""
TEXT_BLOCKS = ("text",)
REASONING_BLOCKS = ("thinking", "redacted_thinking")
IGNORED_BLOCKS = ("server_tool_use", "web_search_tool_result", "compaction", "container_upload")
"""Traces of hosted tools, which this gateway does not run."""


def parse_anthropic(body: Fields, *, counting: bool = False) -> Call:
    """`counting`: for count_tokens, where max_tokens is not needed. Raises RequestError."""
    messages = [Message(role=Role.SYSTEM, text=text) for text in [_system(body)] if text]
    if not body.items("messages"):
        raise body.refuse("messages", "is empty; send at least one")
    for m in body.objects("messages"):
        messages.extend(_messages(m))
    if not messages:
        raise body.refuse("messages", "holds no content")
    if messages[-1].role is Role.ASSISTANT and not counting:
        raise body.refuse(
            "messages", "the last message must not be the assistant's: prefill is not supported"
        )
    if not counting:
        body.whole("max_tokens", low=1, high=1 << 30)
    return Call(
        model=body.text("model"),
        messages=tuple(messages),
        tools=tuple(_tools(body)),
        sampling=replace(sampling_of(body, ("max_tokens",), stop="stop_sequences"), n=1),
        stream=body.flag("stream"),
        tool_choice=choice_of(body),
    )


def _system(body: Fields) -> str:
    value = body.raw("system")
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    texts = [block.text("text", "") for block in body.objects("system")]
    return BLOCKS_JOINED_BY.join(t for t in texts if not t.startswith(BILLING_LINE))


def _tools(body: Fields) -> Iterator[Tool]:
    for tool in body.objects("tools", []):
        if tool.has("input_schema"):  # the others are Anthropic's own (web_search_20250305): hosted
            yield Tool(
                name=tool.text("name"),
                description=tool.text("description", None),
                parameters=tool.child("input_schema").tree,
            )


def _messages(m: Fields) -> Iterator[Message]:
    role = m.text("role")
    if role == "assistant":
        yield _assistant(m)
    elif role == "user":
        yield from _user(m)
    elif role == "system":
        yield Message(role=Role.SYSTEM, text=text_of(m, "content", parts=TEXT_BLOCKS))
    else:
        raise m.refuse("role", f"{role!r} is unknown; it is user, assistant or system")


def _assistant(m: Fields) -> Message:
    if not isinstance(m.raw("content"), list):
        return Message(role=Role.ASSISTANT, text=m.text("content", ""))
    texts, reasoning, calls, handle = list[str](), None, list[ToolCall](), None
    for block in m.objects("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind in REASONING_BLOCKS:
            reasoning = (reasoning or "") + block.text("thinking", "")
            handle = block.text("signature", None) or block.text("data", None) or handle
        elif kind == "tool_use":
            arguments = json.dumps(block.child("input", {}).tree, ensure_ascii=False)
            calls.append(ToolCall(id=block.text("id"), name=block.text("name"), arguments=arguments))
        elif kind not in IGNORED_BLOCKS:
            raise block.refuse("type", f"{kind!r} is not supported in an assistant message")
    return Message(
        role=Role.ASSISTANT,
        text=BLOCKS_JOINED_BY.join(texts),
        reasoning=reasoning,
        tool_calls=tuple(calls),
        handle=handle,
    )


def _user(m: Fields) -> Iterator[Message]:
    """Tool results are messages of their own; what stands before, between and after them is the user's."""
    if not isinstance(m.raw("content"), list):
        yield Message(role=Role.USER, text=m.text("content"))
        return
    texts = list[str]()
    for block in m.objects("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "tool_result":
            if texts:
                yield Message(role=Role.USER, text=BLOCKS_JOINED_BY.join(texts))
                texts = []
            text = text_of(block, "content", parts=TEXT_BLOCKS)
            yield Message(role=Role.TOOL, text=text, tool_call_id=block.text("tool_use_id"))
        elif kind == "document" and block.child("source", {}).raw("type") == "text":
            texts.append(block.child("source").text("data"))
        elif kind not in IGNORED_BLOCKS:
            raise block.refuse(
                "type", f"{kind!r} is not supported: the model behind this address reads text only"
            )
    if texts:
        yield Message(role=Role.USER, text=BLOCKS_JOINED_BY.join(texts))
