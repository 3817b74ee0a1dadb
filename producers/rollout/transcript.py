"""The token-exact record of one episode as it grows: sampled tokens from the engine untouched, all else masked.

Positions are those of the whole trajectory. The same episode is kept as messages, for rewards and people.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...schemas.errors import EngineError
from ...schemas.trajectory import Turn, VersionSpan
from ..engines.protocol import GenerateResult
from ..environments.base import Observation
from .tokenizing import Message, PolicyTokenizer, TokenizingError

LOGPROB_ROUNDING = 1e-4
"""log_softmax may come out this far above 0 in float32; anything larger is a broken engine."""


class Transcript:
    """Token columns, spans, turns and messages of one episode."""

    def __init__(
        self, tokenizer: PolicyTokenizer, prompt_ids: Sequence[int], prompt: str | Sequence[Message]
    ) -> None:
        """`prompt`: the task's raw prompt, or its messages."""
        self._tokenizer = tokenizer
        self.ids = list(prompt_ids)
        self.mask = [False] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.spans: list[VersionSpan] = []
        self.turns: list[Turn] = []
        raw = isinstance(prompt, str)
        self.messages: list[Message] = [{"role": "user", "content": prompt}] if raw else list(prompt)  # type: ignore[arg-type]
        self._context: list[Message] | None = None if raw else list(prompt)  # type: ignore[arg-type]
        """What the chat template has rendered so far; None once raw text is in the context."""
        self._sampled: Sequence[int] = ()
        """Of the last turn."""

    def add_turn(self, result: GenerateResult) -> str:
        """Append one engine call; its text. EngineError where the result cannot be what an engine sampled."""
        logprobs = checked_logprobs(result, self._tokenizer.vocab_size)
        start = len(self.ids)
        self.ids.extend(result.token_ids)
        self.mask.extend([True] * len(logprobs))
        self.logprobs.extend(logprobs)
        self.spans.extend(
            VersionSpan(s.version, start + s.start, start + s.end) for s in result.version_spans
        )
        self.turns.append(Turn(start=start, end=len(self.ids), finish_reason=result.finish_reason))
        self._sampled = result.token_ids
        text = self._tokenizer.decode(result.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def observe(self, observation: Observation, *, limit: int) -> bool:
        """Append what the environment says; False, and nothing appended, unless fewer than `limit` tokens result.

        TokenizingError where it has no faithful token form here.
        """
        if observation.text is not None:
            ids: Sequence[int] = self._tokenizer.text_ids(observation.text)
            if len(self.ids) + len(ids) >= limit:
                return False
            self._context = None
            self.messages.append({"role": "tool", "content": observation.text})
        else:
            new = list(observation.messages or ())
            ids, keep, context = self._bridge(new)
            if keep + len(ids) >= limit:
                return False
            del self.ids[keep:], self.mask[keep:], self.logprobs[keep:]
            self._context = context
            self.messages.extend(new)
        self.ids.extend(ids)
        self.mask.extend([False] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        return True

    def _bridge(self, new: list[Message]) -> tuple[Sequence[int], int, list[Message]]:
        """(ids to append, position to append at, the template's messages afterwards)."""
        if self._context is None:
            raise TokenizingError("template", "messages cannot follow raw text")
        if not self.turns:
            context = [*self._context, *new]  # nothing is sampled yet: the prompt is rendered anew
            return self._tokenizer.chat_ids(context), 0, context
        spoken = self._tokenizer.without_end(self._sampled)
        answer = self._tokenizer.decode(spoken)
        ids = self._tokenizer.bridge_ids(self._context, answer, new, closed=len(spoken) < len(self._sampled))
        return ids, len(self.ids), [*self._context, {"role": "assistant", "content": answer}, *new]

    def columns(self) -> dict[str, Any]:
        """The token columns of a Trajectory."""
        return {
            "token_ids": np.array(self.ids, np.int32),
            "loss_mask": np.array(self.mask, bool),
            "logprobs": np.array(self.logprobs, np.float32),
            "version_spans": tuple(self.spans),
            "turns": tuple(self.turns),
        }


def checked_logprobs(result: GenerateResult, vocab_size: int) -> Sequence[float]:
    """The logprobs of one engine call, with rounding above 0 removed. EngineError for a torn result."""
    ids, logprobs = result.token_ids, result.logprobs
    if not ids or len(logprobs) != len(ids):
        raise EngineError(f"the engine returned {len(ids)} tokens and {len(logprobs)} logprobs")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise EngineError(f"the engine sampled a token outside the vocabulary of {vocab_size}")
    position = 0
    for span in result.version_spans:
        if span.version < 0 or span.start != position or span.end <= position:
            raise EngineError("the engine's version spans do not tile its tokens")
        position = span.end
    if position != len(ids):
        raise EngineError("the engine's version spans do not tile its tokens")
    if not all(map(math.isfinite, logprobs)) or max(logprobs) > LOGPROB_ROUNDING:
        raise EngineError("the engine returned a logprob that is not finite, or above 0")
    return logprobs if max(logprobs) <= 0.0 else [min(p, 0.0) for p in logprobs]
