"""Answers in the form of the chat completions API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import sse
from .answer import Answer, Called, Done, Event, Head, Reasoning, Text, TokenLogprob, Usage
from .errors import RequestError, openai_error
from .messages import ToolCall


class ChatWriter:
    """A `chat.completion`, or its chunks."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._called: dict[int, int] = {}

    def begin(self) -> bytes:
        """The first chunk of each choice, which carries the role."""
        return b"".join(
            self._chunk(i, {"role": "assistant", "content": ""}) for i in range(self._head.call.sampling.n)
        )

    def event(self, event: Event) -> bytes:
        """One chunk; a tool call is whole in its chunk."""
        match event:
            case Text():
                return self._chunk(event.index, {"content": event.text}, tokens=event.tokens)
            case Reasoning():
                return self._chunk(event.index, {"reasoning_content": event.text})
            case Called():
                at = self._called.get(event.index, 0)
                self._called[event.index] = at + 1
                return self._chunk(event.index, {"tool_calls": [{"index": at, **_call(event.call)}]})
            case Done():
                reason = _finish(event.finish_reason, bool(self._called.get(event.index)))
                return self._chunk(event.index, {}, finish=reason, tokens=event.tokens)

    def end(self, usage: Usage) -> bytes:
        """The usage chunk where it was asked for, and the end mark."""
        if not self._head.call.include_usage:
            return sse.DONE
        return (
            sse.frame({**self._base("chat.completion.chunk"), "choices": [], "usage": usage_of(usage)})
            + sse.DONE
        )

    def ping(self) -> bytes:
        """A comment."""
        return sse.COMMENT

    def failed(self, error: RequestError) -> bytes:
        """An error object in the stream."""
        return sse.frame(openai_error(error)) + sse.DONE

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The completion."""
        choices = []
        for i, a in enumerate(answers):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": a.text or (None if a.calls else ""),
                "refusal": None,
            }
            if a.reasoning is not None:
                message["reasoning_content"] = a.reasoning
            if a.calls:
                message["tool_calls"] = [_call(c) for c in a.calls]
            reason = _finish(a.finish_reason, bool(a.calls))
            choices.append(
                {
                    "index": i,
                    "message": message,
                    "logprobs": self._logprobs(a.tokens),
                    "finish_reason": reason,
                }
            )
        return {**self._base("chat.completion"), "choices": choices, "usage": usage_of(usage)}

    def _base(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"chatcmpl-{head.id}",
            "object": kind,
            "created": head.created,
            "model": head.call.model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        tokens: Sequence[TokenLogprob] = (),
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(tokens) if tokens else None}
        tree = {**self._base("chat.completion.chunk"), "choices": [{**choice, "finish_reason": finish}]}
        return sse.frame({**tree, "usage": None} if self._head.call.include_usage else tree)

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        call = self._head.call
        if not call.logprobs:
            return None
        return {"content": [logprob_of(t, top=call.top_logprobs) for t in tokens], "refusal": None}


def logprob_of(t: TokenLogprob, *, top: int) -> dict[str, Any]:
    """One token; of the alternatives only the sampled one is known."""
    one = {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode())}
    return {**one, "top_logprobs": [dict(one)] if top else []}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Counts."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.total,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(reason: str, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else reason
