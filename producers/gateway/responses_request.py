"""POST /v1/responses: the body -> Call. Items that the assistant made in one turn become one message again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from .chat_request import (
    BLOCKS_JOINED_BY,
    arguments_of,
    choice_of,
    function_of,
    qualified,
    sampling_of,
    text_of,
)
from .messages import Call, Message, Role, Tool, ToolCall
from .reading import Fields

IGNORED_ITEMS = ("web_search_call", "file_search_call", "image_generation_call", "compaction_trigger")
"""Traces of hosted tools, which this gateway does not run."""
NOT_KEPT = ("previous_response_id", "conversation")


def parse_responses(body: Fields) -> Call:
    """Raises RequestError."""
    for name in NOT_KEPT:
        if body.has(name):
            raise body.refuse(name, "responses are not kept here: send the whole conversation in `input`")
    messages: list[Message] = []
    if instructions := body.text("instructions", ""):
        messages.append(Message(role=Role.SYSTEM, text=instructions))
    if isinstance(body.raw("input"), str):
        messages.append(Message(role=Role.USER, text=body.text("input")))
    else:
        if not body.items("input"):
            raise body.refuse("input", "is empty; send at least one item")
        _read(body.objects("input"), messages)
    if not messages:
        raise body.refuse("input", "holds no message")
    return Call(
        model=body.text("model"),
        messages=tuple(messages),
        tools=tuple(_tools(body.objects("tools", []))),
        sampling=replace(sampling_of(body, ("max_output_tokens",), stop=None), n=1),
        stream=body.flag("stream"),
        top_logprobs=body.whole("top_logprobs", 0, low=0, high=20),
        logprobs="message.output_text.logprobs" in body.items("include", []),
        tool_choice=choice_of(body),
    )


def _tools(tools: Iterator[Fields], namespace: str | None = None) -> Iterator[Tool]:
    """Functions, those inside namespaces too; hosted tools (web_search and the like) are left out."""
    for tool in tools:
        kind = tool.text("type")
        if kind == "function":
            yield function_of(tool, namespace)
        elif kind == "custom":
            yield replace(function_of(tool, namespace), parameters=_FREE_TEXT, free_text=True)
        elif kind == "namespace":
            yield from _tools(tool.objects("tools", []), tool.text("name"))


_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def _read(items: Iterator[Fields], messages: list[Message]) -> None:
    turn: Message | None = None
    for item in items:
        kind = item.text("type", "message")
        part = _assistant_part(item, kind)
        if part is not None:
            if turn is not None and part.reasoning is not None and (turn.text or turn.tool_calls):
                messages.append(turn)
                turn = None
            turn = part if turn is None else _joined(turn, part)
            continue
        found = _other(item, kind)
        if found is None:
            continue
        if turn is not None:
            messages.append(turn)
            turn = None
        messages.append(found)
    if turn is not None:
        messages.append(turn)


def _assistant_part(item: Fields, kind: str) -> Message | None:
    if kind == "message" and item.raw("role") == Role.ASSISTANT:
        return Message(role=Role.ASSISTANT, text=text_of(item, "content"))
    if kind == "reasoning":
        texts = [part.text("text", "") for name in ("content", "summary") for part in item.objects(name, [])]
        return Message(
            role=Role.ASSISTANT,
            reasoning=texts[0] if texts else "",
            handle=item.text("encrypted_content", None),
        )
    if kind in ("function_call", "custom_tool_call"):
        name = qualified(item.text("namespace", None), item.text("name"))
        arguments = (
            arguments_of(item.raw("arguments"))
            if kind == "function_call"
            else json.dumps({"input": item.text("input", "")}, ensure_ascii=False)
        )
        call = ToolCall(
            id=item.text("call_id"),
            name=name,
            arguments=arguments,
            namespace=item.text("namespace", None),
        )
        return Message(role=Role.ASSISTANT, tool_calls=(call,))
    return None


def _joined(turn: Message, part: Message) -> Message:
    texts = [t for t in (turn.text, part.text) if t]
    return replace(
        turn,
        text=BLOCKS_JOINED_BY.join(texts),
        reasoning=part.reasoning if turn.reasoning is None else turn.reasoning,
        tool_calls=turn.tool_calls + part.tool_calls,
        handle=turn.handle or part.handle,
    )


def _other(item: Fields, kind: str) -> Message | None:
    if kind == "message":
        role = item.text("role")
        if role not in (Role.SYSTEM, Role.DEVELOPER, Role.USER):
            raise item.refuse("role", f"{role!r} is unknown; it is system, developer, user or assistant")
        return Message(role=Role(role), text=text_of(item, "content"))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message(role=Role.TOOL, text=text_of(item, "output"), tool_call_id=item.text("call_id"))
    if kind in IGNORED_ITEMS:
        return None
    raise item.refuse(
        "type", f"{kind!r} is not supported; send messages, reasoning, function calls and their outputs"
    )
