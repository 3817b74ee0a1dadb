"""POST /v1/completions: the body -> Call."""

from __future__ import annotations

from typing import Any

from .chat_request import sampling_of
from .messages import Call
from .reading import Fields

DEFAULT_MAX_TOKENS = 16
"""What the API promises without max_tokens."""


def parse_completions(body: Fields) -> Call:
    """One prompt, as text or token ids. Raises RequestError."""
    limit = body.whole("max_tokens", DEFAULT_MAX_TOKENS, low=1, high=1 << 30)
    sampling = sampling_of(Fields({**body.tree, "max_tokens": limit}, ""), ("max_tokens",), stop="stop")
    return Call(
        model=body.text("model"),
        messages=(),
        sampling=sampling,
        stream=body.flag("stream"),
        logprobs=body.raw("logprobs") is not None and body.whole("logprobs", low=0, high=20) >= 0,
        include_usage=body.child("stream_options", {}).flag("include_usage"),
        prompt=_prompt(body, body.raw("prompt")),
        echo=body.flag("echo"),
    )


def _prompt(body: Fields, value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(i) is int for i in value):
        if not all(0 <= i < 1 << 31 for i in value):
            raise body.refuse("prompt", "a token id is negative or too large")
        return tuple(value)
    raise body.refuse("prompt", "must be one text or one list of token ids, and not empty")
