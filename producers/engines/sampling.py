"""Temperature, top-k and top-p per request, and their cost only in steps in which some request asks for them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

Requests = list[Any]
"""transformers' FutureRequestState, one per request of a step."""


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """One float per request; `default` changes nothing."""

    key: str
    default = 1.0
    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs = ()

    def __init__(self) -> None:
        self.values: list[float] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Requests) -> torch.Tensor:
        self.values = [
            r.state.logit_processor_kwargs.get(self.key, self.default) for r in requests_with_new_token
        ]
        return torch.empty(0, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if all(v == self.default for v in self.values):
            return scores
        values = torch.tensor(self.values, dtype=torch.float32, device=scores.device)
        return self.process(scores, values.unsqueeze(-1))

    def process(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """scores [R, V], values [R, 1] -> [R, V]."""
        raise NotImplementedError


class Temperature(_PerRequest):
    """Scores divided by the temperature."""

    key = "temperature"
    supported_kwargs: ClassVar[dict[str, type]] = {"temperature": float}

    def process(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return scores / values


class TopK(_PerRequest):
    """Only the k best scores; 0 is no limit."""

    key = "top_k"
    default = 0
    supported_kwargs: ClassVar[dict[str, type]] = {"top_k": int}

    def process(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        vocab = scores.shape[-1]
        k = torch.where(values > 0, values, vocab).long().clamp(max=vocab)
        least = scores.sort(dim=-1, descending=True).values.gather(-1, k - 1)
        return scores.masked_fill(scores < least, -torch.inf)


class TopP(_PerRequest):
    """The smallest set of best tokens whose probability reaches p."""

    key = "top_p"
    supported_kwargs: ClassVar[dict[str, type]] = {"top_p": float}

    def process(self, scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= values)
        return scores.masked_fill(dropped, -torch.inf)


def processors() -> ContinuousBatchingLogitsProcessorList:
    """The three, in the order in which `generate` applies them."""
    made = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([Temperature(), TopK(), TopP()]))
    made.tensors_required = 3
    return made
