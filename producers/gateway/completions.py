"""Answers in the form of the completions API, which knows only text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import sse
from .answer import Answer, Done, Event, Head, Text, TokenLogprob, Usage
from .chat import usage_of
from .errors import RequestError, openai_error


class CompletionsWriter:
    """A `text_completion`, or its chunks."""

    def __init__(self, head: Head) -> None:
        self._head, self._echo = head, head.echoed

    def begin(self) -> bytes:
        """The prompt, where it is to be echoed."""
        if not self._echo:
            return b""
        return b"".join(self._chunk(i, self._echo) for i in range(self._head.call.sampling.n))

    def event(self, event: Event) -> bytes:
        """One chunk."""
        match event:
            case Text():
                return self._chunk(event.index, event.text, tokens=event.tokens)
            case Done():
                return self._chunk(event.index, "", finish=event.finish_reason, tokens=event.tokens)
            case _:
                return b""

    def end(self, usage: Usage) -> bytes:
        """The usage chunk where it was asked for, and the end mark."""
        if not self._head.call.include_usage:
            return sse.DONE
        return sse.frame({**self._base(), "choices": [], "usage": usage_of(usage)}) + sse.DONE

    def ping(self) -> bytes:
        """A comment."""
        return sse.COMMENT

    def failed(self, error: RequestError) -> bytes:
        """An error object in the stream."""
        return sse.frame(openai_error(error)) + sse.DONE

    def whole(self, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
        """The completion."""
        choices = [
            self._choice(i, self._echo + a.text, a.finish_reason, a.tokens) for i, a in enumerate(answers)
        ]
        return {**self._base(), "choices": choices, "usage": usage_of(usage)}

    def _base(self) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"cmpl-{head.id}",
            "object": "text_completion",
            "created": head.created,
            "model": head.call.model,
        }

    def _chunk(
        self, index: int, text: str, *, finish: str | None = None, tokens: Sequence[TokenLogprob] = ()
    ) -> bytes:
        return sse.frame({**self._base(), "choices": [self._choice(index, text, finish, tokens)]})

    def _choice(
        self, index: int, text: str, finish: str | None, tokens: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        logprobs = None
        if self._head.call.logprobs and tokens:
            offsets, at = [], 0
            for t in tokens:
                offsets.append(at)
                at += len(t.text)
            logprobs = {
                "tokens": [t.text for t in tokens],
                "token_logprobs": [t.logprob for t in tokens],
                "top_logprobs": [{t.text: t.logprob} for t in tokens],
                "text_offset": offsets,
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
