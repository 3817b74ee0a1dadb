"""Answers in the form of the Messages API. Every frame has its `event:` field: SDKs skip those without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from . import sse
from .answer import Answer, Called, Done, Event, Head, Reasoning, Text, Usage
from .errors import RequestError, anthropic_error
from .messages import ToolCall


class AnthropicWriter:
    """A `message`, or its events."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._index = 0
        self._open: str | None = None
        self._called = False
        self._done: Done | None = None

    def begin(self) -> bytes:
        """`message_start`, and a ping as the API sends it."""
        message = self._message(
            [], None, None, {"input_tokens": self._head.prompt_tokens, "output_tokens": 0}
        )
        return _frame("message_start", message=message) + self.ping()

    def event(self, event: Event) -> bytes:
        """Opens, fills and closes content blocks, with ascending index."""
        match event:
            case Text():
                return self._delta("text", {"text": ""}, {"type": "text_delta", "text": event.text})
            case Reasoning():
                delta = {"type": "thinking_delta", "thinking": event.text}
                return self._delta("thinking", {"thinking": "", "signature": ""}, delta)
            case Called():
                self._called = True
                block = {**_tool_use(event.call), "input": {}}
                sent = self._close() + self._start("tool_use", block)
                sent += self._fill({"type": "input_json_delta", "partial_json": event.call.arguments})
                return sent + self._close()
            case Done():
                self._done = event
                return self._close()

    def end(self, usage: Usage) -> bytes:
        """`message_delta` with the stop reason and the counts, and `message_stop`."""
        done = self._done or Done(index=0, finish_reason="stop")
        reason = _stop_reason(done.finish_reason, done.stop_text, self._called)
        delta = {"stop_reason": reason, "stop_sequence": done.stop_text}
        return _frame("message_delta", delta=delta, usage=_usage(usage)) + _frame("message_stop")

    def ping(self) -> bytes:
        """The API's own event for it."""
        return _frame("ping")

    def failed(self, error: RequestError) -> bytes:
        """An `error` event."""
        return sse.frame(anthropic_error(error), "error")

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The message."""
        a = answers[0]
        content: list[dict[str, Any]] = []
        if a.reasoning is not None:
            content.append({"type": "thinking", "thinking": a.reasoning, "signature": self._signature})
        if a.text:
            content.append({"type": "text", "text": a.text})
        content += [{**_tool_use(c), "input": _object(c.arguments)} for c in a.calls]
        reason = _stop_reason(a.finish_reason, a.stop_text, bool(a.calls))
        return self._message(content, reason, a.stop_text, _usage(usage))

    @property
    def _signature(self) -> str:
        return self._head.handle(0) or self._head.id

    def _delta(self, kind: str, empty: dict[str, Any], delta: dict[str, Any]) -> bytes:
        sent = b""
        if self._open != kind:
            sent = self._close() + self._start(kind, {"type": kind, **empty})
        return sent + self._fill(delta)

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._open = kind
        return _frame("content_block_start", index=self._index, content_block=block)

    def _fill(self, delta: dict[str, Any]) -> bytes:
        return _frame("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        sent = b""
        if self._open == "thinking":
            sent = self._fill({"type": "signature_delta", "signature": self._signature})
        sent += _frame("content_block_stop", index=self._index)
        self._open = None
        self._index += 1
        return sent

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.call.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def _frame(kind: str, **fields: Any) -> bytes:
    return sse.frame({"type": kind, **fields}, kind)


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _object(arguments: str) -> dict[str, Any]:
    value = json.loads(arguments)
    return value if isinstance(value, dict) else {"value": value}


def _stop_reason(finish: str, stop: str | None, called: bool) -> str:
    if finish == "length":
        return "max_tokens"
    if called:
        return "tool_use"
    return "end_turn" if stop is None else "stop_sequence"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "output_tokens": usage.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
