"""SGLang's messages: the body of POST /generate, and what `meta_info` of its answers says.

Field names as in SGLang's main branch of autumn 2026 (srt/managers/io_struct.py, tokenizer_manager.py), from its
public sources. `output_token_logprobs` holds [logprob, token id, text or null] per sampled token, the stop token
included; in a stream it is cumulative or, with --incremental-streaming-output, what is new, and
`output_token_logprobs_length` counts all either way. `weight_versions`, where the server has it, tiles the output
with {version, start, end}; `weight_version` alone is the server's version at the time of the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import EngineError
from .protocol import GenerateRequest

Span = tuple[str, int, int]
"""(version as the server names it, start, end)."""

_NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": False,
    "no_stop_trim": True,
}
"""Stated because a server may have other defaults (the model's generation_config.json)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A finished answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    spans: tuple[Span, ...] | None
    """None: the server does not attribute tokens."""
    version: str | None
    """The server's version when it answered."""


def request_body(
    request: GenerateRequest, *, rid: str, max_tokens: int, cache_key: str, stream: bool
) -> dict[str, Any]:
    """The body of POST /generate. `cache_key`: prefixes are shared only between requests with the same one."""
    return {
        "rid": rid,
        "input_ids": list(request.token_ids),
        "sampling_params": {
            **_NEUTRAL,
            "max_new_tokens": max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            # Not ignore_eos: SGLang then ignores these too.
            "stop_token_ids": list(request.stop_token_ids),
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": stream,
        "extra_key": cache_key,
    }


class Answer:
    """Puts one answer together, from one message or from the chunks of a stream."""

    __slots__ = ("_meta", "_pairs")

    def __init__(self) -> None:
        self._pairs: list[Any] = []
        self._meta: dict[str, Any] = {}

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._pairs)

    def take(self, message: Any) -> None:
        """The next chunk, or the whole answer. Raises EngineError where it does not fit what came before."""
        meta = message.get("meta_info") if isinstance(message, dict) else None
        if not isinstance(meta, dict):
            raise EngineError("the server's answer has no meta_info")
        pairs = meta.get("output_token_logprobs") or []
        total = meta.get("output_token_logprobs_length", meta.get("completion_tokens", len(pairs)))
        if len(pairs) == total:
            self._pairs = list(pairs)
        elif len(self._pairs) + len(pairs) == total:
            self._pairs += pairs
        else:
            raise EngineError(
                f"the server has lost tokens: {len(self._pairs)} came before, {len(pairs)} now, it counts {total}"
            )
        self._meta = meta

    def finish(self) -> Sampled:
        """The whole. Raises EngineError."""
        reason = (self._meta.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"the server's answer has no end that is known: {reason!r}")
        if not self._pairs:
            why = (self._meta.get("finish_reason") or {}).get("message", reason)
            raise EngineError(f"the request ended before its first token: {why}")
        if self._meta.get("completion_tokens", len(self._pairs)) != len(self._pairs):
            raise EngineError(
                f"the server counts {self._meta['completion_tokens']} tokens and sent {len(self._pairs)}"
            )
        try:
            if not all(math.isfinite(p) for p, *_ in self._pairs):
                raise ValueError("a log-probability is not finite")
            return Sampled(
                token_ids=tuple(int(token) for _, token, *_ in self._pairs),
                # Rounding may put a probability of 1 a little above it.
                logprobs=tuple(min(float(p), 0.0) for p, *_ in self._pairs),
                finish_reason=reason,
                spans=_spans(self._meta.get("weight_versions")),
                version=self._meta.get("weight_version"),
            )
        except (TypeError, ValueError, KeyError) as e:
            raise EngineError(f"the server's answer is not as SGLang documents it: {e!r}") from None


def _spans(items: Any) -> tuple[Span, ...] | None:
    if not items:
        return None
    spans = ((str(i["version"]), int(i["start"]), int(i["end"])) for i in items)
    return tuple(s for s in spans if s[2] > s[1])
