"""POST /v1/chat/completions: the body -> Call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .errors import RequestError
from .messages import Call, Message, Role, Sampling, Tool, ToolCall
from .reading import Fields, kind_of

MOST_STOPS = 16
MOST_CHOICES = 128
MOST_TOKENS = 1 << 30
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
BLOCKS_JOINED_BY = "\n"
"""Between the text blocks of one message, in every API."""
_PLAIN: dict[str, Role] = {role.value: role for role in (Role.SYSTEM, Role.DEVELOPER, Role.USER)}


def parse_chat(body: Fields) -> Call:
    """Raises RequestError."""
    options = body.child("stream_options", {})
    return Call(
        model=body.text("model"),
        messages=tuple(_messages(body)),
        tools=tuple(_tools(body)),
        sampling=sampling_of(body, ("max_completion_tokens", "max_tokens"), stop="stop"),
        stream=body.flag("stream"),
        logprobs=body.flag("logprobs"),
        top_logprobs=body.whole("top_logprobs", 0, low=0, high=20),
        include_usage=options.flag("include_usage"),
        tool_choice=choice_of(body),
    )


def sampling_of(body: Fields, limits: tuple[str, ...], *, stop: str | None) -> Sampling:
    """How to sample, by the fields that the APIs share; the first of `limits` that is there counts."""
    limit = next((name for name in limits if body.has(name)), limits[0])
    return Sampling(
        max_tokens=body.whole(limit, None, low=1, high=MOST_TOKENS),
        temperature=body.number("temperature", 1.0, low=0, high=2),
        top_p=body.number("top_p", 1.0, low=0, high=1) or 1e-6,
        top_k=max(0, body.whole("top_k", 0, low=-1, high=1 << 30)),
        stop=body.texts(stop, most=MOST_STOPS) if stop else (),
        n=body.whole("n", 1, low=1, high=MOST_CHOICES),
    )


def choice_of(body: Fields) -> str:
    """`auto`, `none`, or `required` where the client insists on a call."""
    value = body.raw("tool_choice")
    kind = value.get("type") if isinstance(value, dict) else value
    if kind in (None, "auto", "none"):
        return kind or "auto"
    if isinstance(kind, str):
        return "required"
    raise body.refuse("tool_choice", "must be a string or an object with a type")


def text_of(fields: Fields, name: str, *, parts: tuple[str, ...] = TEXT_PARTS) -> str:
    """Content that is a string, a list of text parts, or null."""
    value = fields.raw(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fields.refuse(name, "must be a string or a list of parts")
    return BLOCKS_JOINED_BY.join(_part(p, parts) for p in fields.objects(name))


def _part(part: Fields, parts: tuple[str, ...]) -> str:
    kind = part.text("type", "text")
    if kind not in parts:
        raise part.refuse("type", f"{kind!r} is not supported: the model behind this address reads text only")
    return part.text("refusal" if kind == "refusal" else "text", "")


def _messages(body: Fields) -> Iterator[Message]:
    items = body.items("messages")
    if not items:
        raise body.refuse("messages", "is empty; send at least one")
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise body.refuse(f"messages[{i}]", f"must be an object, not {kind_of(item)}")
        role, content = item.get("role"), item.get("content")
        # Most of a long conversation is of this form; the rest of it is read at a quarter of the speed.
        if type(content) is str and type(role) is str and role in _PLAIN:
            yield Message(role=_PLAIN[role], text=content)
        else:
            yield _message(Fields(item, f"messages[{i}]"))


def _message(m: Fields) -> Message:
    role = m.text("role")
    if role == "function":  # the form of before 2023-11
        return Message(role=Role.TOOL, text=text_of(m, "content"), tool_call_id=m.text("name"))
    if role not in set(Role):
        raise m.refuse("role", f"{role!r} is unknown; it is one of {', '.join(Role)}")
    plain = Message(role=Role(role), text=text_of(m, "content"))
    if role == Role.TOOL:
        return replace(plain, tool_call_id=m.text("tool_call_id"))
    if role != Role.ASSISTANT:
        if not m.has("content"):
            raise m.refuse("content", "is missing; it must be a string or a list of parts")
        return plain
    reasoning = m.raw("reasoning_content") if m.has("reasoning_content") else m.raw("reasoning")
    return replace(
        plain,
        tool_calls=tuple(_call(c) for c in m.objects("tool_calls", [])),
        reasoning=reasoning if isinstance(reasoning, str) else None,
    )


def _call(c: Fields) -> ToolCall:
    function = c.child("function")
    return ToolCall(
        id=c.text("id"), name=function.text("name"), arguments=arguments_of(function.raw("arguments"))
    )


def arguments_of(value: Any) -> str:
    """Arguments as text; the empty ones of a tool without parameters are an object."""
    if value is None or value == "":
        return "{}"
    if not isinstance(value, str):
        raise RequestError("arguments: must be a string that holds JSON", param="arguments")
    return value


def _tools(body: Fields) -> Iterator[Tool]:
    for tool in body.objects("tools", []):
        if tool.text("type", "function") == "function":
            yield function_of(tool.child("function"))


def function_of(f: Fields, namespace: str | None = None) -> Tool:
    """A function tool; `namespace`: of the Codex namespace that holds it."""
    name = f.text("name")
    return Tool(
        name=name if namespace is None else qualified(namespace, name),
        description=f.text("description", None),
        parameters=f.child("parameters", {}).tree,
        namespace=namespace,
    )


def qualified(namespace: str | None, name: str) -> str:
    """The name under which the model knows a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
