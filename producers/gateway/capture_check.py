"""What an engine answered, before it is trained on: a torn result is served, never trained, never padded."""

from __future__ import annotations

import math

from ..engines.protocol import GenerateResult
from .messages import Sampling

ROUNDING = 1e-4
"""log_softmax may come out this far above 0 in float32; anything larger is a broken engine."""


def in_vocabulary(result: GenerateResult, vocab_size: int) -> bool:
    """Whether the sampled ids can be a context at all."""
    return not result.token_ids or (min(result.token_ids) >= 0 and max(result.token_ids) < vocab_size)


def untrainable(result: GenerateResult, sampling: Sampling, vocab_size: int) -> str | None:
    """Why the tokens of `result` must not be trained; None where they may be."""
    ids, logprobs = result.token_ids, result.logprobs
    if not ids:
        return "empty: the engine sampled nothing"
    if len(logprobs) != len(ids):
        return f"length_mismatch: {len(ids)} ids, {len(logprobs)} logprobs"
    if not in_vocabulary(result, vocab_size):
        return f"token_out_of_range: an id outside the vocabulary of {vocab_size}"
    if not all(map(math.isfinite, logprobs)):
        return "logprob_not_finite: an infinite or undefined logprob"
    if max(logprobs) > ROUNDING:
        return f"logprob_positive: a logprob of {max(logprobs):.4g}"
    position = 0
    for span in result.version_spans:
        if span.version < 0 or span.start != position or span.end <= position:
            return "version_spans: they do not tile the sampled tokens"
        position = span.end
    if position != len(ids):
        return "version_spans: they do not tile the sampled tokens"
    if sampling.temperature <= 0:
        return "greedy: temperature 0 is not a distribution to learn from"
    return None
