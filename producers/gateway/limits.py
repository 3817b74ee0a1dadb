"""What one request may take, and how its sampling is bounded by the context."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..engines.protocol import GenerateRequest
from .errors import context_overflow
from .messages import Call, Sampling

GREEDY_TEMPERATURE = 1.0
"""Engines sample at temperatures above 0; of one candidate any temperature chooses the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one request."""

    body_bytes: int = 64 << 20
    messages: int = 4096
    context_tokens: int = 32768
    """Prompt and answer."""
    turn_tokens: int | None = None
    """Of one answer; None: what the context allows."""
    in_flight: int = 1024
    """Requests of the whole gateway."""


def check_size(call: Call, limits: Limits) -> None:
    """Raise RequestError for a conversation of too many messages, in the form that makes clients compact it."""
    if len(call.messages) > limits.messages:
        raise context_overflow(len(call.messages), limits.messages, unit="messages")


def turn_tokens(sampling: Sampling, prompt_tokens: int, limits: Limits) -> int:
    """How many tokens the answer may have. RequestError where the prompt leaves no room."""
    room = limits.context_tokens - prompt_tokens
    if room < 1:
        raise context_overflow(prompt_tokens, limits.context_tokens - 1)
    return min(n for n in (room, sampling.max_tokens, limits.turn_tokens) if n is not None)


def engine_request(
    request_id: str, prompt: tuple[int, ...], sampling: Sampling, max_tokens: int, stop_ids: tuple[int, ...]
) -> GenerateRequest:
    """What an engine is asked for one choice."""
    greedy = sampling.temperature <= 0
    return GenerateRequest(
        request_id=request_id,
        token_ids=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stop_ids,
        temperature=GREEDY_TEMPERATURE if greedy else sampling.temperature,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=1 if greedy else sampling.top_k,
    )


def with_policy(call: Call, *, temperature: float | None) -> Call:
    """`call`, sampled at the gateway's temperature where the configuration sets one."""
    if temperature is None:
        return call
    return replace(call, sampling=replace(call.sampling, temperature=temperature))
