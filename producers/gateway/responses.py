"""Answers in the form of the Responses API.

Codex takes its turn from `response.output_item.done` events alone and waits for `response.completed`; the SDK wants
`response.created` first. So every item is opened, filled and closed in order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import sse
from .answer import Answer, Called, Done, Event, Head, Reasoning, Text, TokenLogprob, Usage
from .chat import logprob_of
from .errors import RequestError
from .messages import Tool, ToolCall

STATUS = {"stop": "completed", "length": "incomplete"}


class ResponsesWriter:
    """A `response`, or its events."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._tools = {t.name: t for t in head.call.tools}
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._finish = "stop"

    def begin(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        response = self._response("in_progress", [], None)
        return self._frame("response.created", response=response) + self._frame(
            "response.in_progress", response=response
        )

    def event(self, event: Event) -> bytes:
        """Opens, fills and closes items."""
        match event:
            case Text():
                opened, item = self._in("message")
                item.text += event.text
                item.tokens += event.tokens
                return opened + self._frame(
                    "response.output_text.delta",
                    **item.place,
                    content_index=0,
                    delta=event.text,
                    logprobs=self._logprobs(event.tokens),
                )
            case Reasoning():
                opened, item = self._in("reasoning")
                item.text += event.text
                return opened + self._frame(
                    "response.reasoning_text.delta", **item.place, content_index=0, delta=event.text
                )
            case Called():
                return self._close() + self._call(event.call)
            case Done():
                self._finish = event.finish_reason
                return self._close()

    def end(self, usage: Usage) -> bytes:
        """`response.completed`, or `response.incomplete` where a limit cut the turn."""
        status = STATUS[self._finish]
        return self._frame(f"response.{status}", response=self._response(status, self._items, usage))

    def ping(self) -> bytes:
        """An event, since Codex does not count comments as life."""
        return self._frame("response.in_progress", response=self._response("in_progress", [], None))

    def failed(self, error: RequestError) -> bytes:
        """`response.failed`, with the error where Codex looks for it."""
        response = self._response("failed", self._items, None)
        response["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._frame("response.failed", response=response)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The response."""
        for a in answers:
            if a.reasoning is not None:
                self.event(Reasoning(index=0, text=a.reasoning))
            if a.text or not a.calls:
                self.event(Text(index=0, text=a.text, tokens=tuple(a.tokens)))
            for call in a.calls:
                self.event(Called(index=0, call=call))
            self.event(Done(index=0, finish_reason=a.finish_reason))
        return self._response(STATUS[self._finish], self._items, usage)

    def _in(self, kind: str) -> tuple[bytes, _Open]:
        """The open item of `kind`, and what it takes to open it."""
        if self._open is not None and self._open.kind == kind:
            return b"", self._open
        sent = self._close()
        self._open = item = _Open(
            kind, self._id({"message": "msg", "reasoning": "rs"}[kind]), len(self._items)
        )
        sent += self._frame(
            "response.output_item.added", output_index=item.index, item=self._shown(item, "in_progress")
        )
        if kind == "message":
            part = _output_text("", [])
            sent += self._frame("response.content_part.added", **item.place, content_index=0, part=part)
        return sent, item

    def _close(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if item.kind == "message":
            logprobs = self._logprobs(item.tokens)
            sent = self._frame(
                "response.output_text.done", **item.place, content_index=0, text=item.text, logprobs=logprobs
            ) + self._frame(
                "response.content_part.done",
                **item.place,
                content_index=0,
                part=_output_text(item.text, logprobs),
            )
        else:
            sent = self._frame("response.reasoning_text.done", **item.place, content_index=0, text=item.text)
        return sent + self._item_done(self._shown(item, "completed"))

    def _item_done(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        return self._frame("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: ToolCall) -> bytes:
        tool = self._tools.get(call.name)
        name, place = _own_name(tool, call.name), {"output_index": len(self._items)}
        if tool is not None and tool.free_text:
            item_id, text = self._id("ctc"), _free_text(call.arguments)
            item = {
                "id": item_id,
                "type": "custom_tool_call",
                "call_id": call.id,
                "name": name,
                "input": text,
            }
            kind, value, empty = "custom_tool_call_input", {"input": text}, {"input": ""}
        else:
            item_id, text = self._id("fc"), call.arguments
            item = {
                "id": item_id,
                "type": "function_call",
                "call_id": call.id,
                "name": name,
                "arguments": text,
            }
            kind, value, empty = (
                "function_call_arguments",
                {"arguments": text, "name": name},
                {"arguments": ""},
            )
        if tool is not None and tool.namespace:
            item["namespace"] = tool.namespace
        place["item_id"] = item_id  # type: ignore[assignment]
        return (
            self._frame(
                "response.output_item.added",
                output_index=place["output_index"],
                item={**item, **empty, "status": "in_progress"},
            )
            + self._frame(f"response.{kind}.delta", **place, delta=text)
            + self._frame(f"response.{kind}.done", **place, **value)
            + self._item_done({**item, "status": "completed"})
        )

    def _shown(self, item: _Open, status: str) -> dict[str, Any]:
        if item.kind == "message":
            content = [_output_text(item.text, self._logprobs(item.tokens))] if status == "completed" else []
            return {
                "id": item.id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        content = [{"type": "reasoning_text", "text": item.text}] if status == "completed" else []
        return {
            "id": item.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": self._head.handle(0),
            "status": status,
        }

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        call = self._head.call
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._head.id}",
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": None,
            "max_output_tokens": call.sampling.max_tokens,
            "metadata": {},
            "model": call.model,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": call.sampling.temperature,
            "tool_choice": call.tool_choice,
            "tools": [],
            "top_p": call.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        call = self._head.call
        return [logprob_of(t, top=call.top_logprobs) for t in tokens] if call.logprobs else []

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._head.id}_{len(self._items)}"

    def _frame(self, kind: str, **fields: Any) -> bytes:
        tree = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return sse.frame(tree, kind)


class _Open:
    """The item that is being filled."""

    __slots__ = ("id", "index", "kind", "text", "tokens")

    def __init__(self, kind: str, item_id: str, index: int) -> None:
        self.kind, self.id, self.index = kind, item_id, index
        self.text = ""
        self.tokens: list[TokenLogprob] = []

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _own_name(tool: Tool | None, name: str) -> str:
    """A tool's name inside its namespace."""
    if tool is None or not tool.namespace:
        return name
    return name.removeprefix(tool.namespace).removeprefix("__")


def _free_text(arguments: str) -> str:
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return arguments


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }
