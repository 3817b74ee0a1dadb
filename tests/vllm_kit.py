"""Models small enough to make on the spot that vLLM's CPU kernels take (head size 32), and plain forwards of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_kit import anchor, bits_of, perturbed, picked
from transformers import (
    DynamicCache,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.producers.engines.live_weights import LiveWeights

VOCAB = 61
KINDS = ("dense", "tied", "moe")
Weights = dict[str, np.ndarray]


def small_model(kind: str, seed: int = 0) -> Any:
    """A random model in float32 that holds bf16 values; its distributions are far from uniform."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind == "tied",
        "initializer_range": 0.2,
    }
    if kind == "moe":
        model: Any = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **settings,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                norm_topk_prob=True,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model = model.float().eval()
    LiveWeights(model).round_to_bf16()
    return model


def saved(kind: str, directory: Path) -> Path:
    """A model directory whose weights no test uses: the first anchor must replace them all."""
    small_model(kind, seed=99).save_pretrained(directory)
    return directory


def versions(kind: str, count: int) -> list[Weights]:
    """Weights of versions 0 to count - 1, each some steps away from the one before."""
    made = [bits_of(small_model(kind))]
    for seed in range(1, count):
        made.append(perturbed(made[-1], seed))
    return made


def model_with(kind: str, weights: Weights) -> Any:
    """A plain float32 model that holds `weights`."""
    model = small_model(kind)
    LiveWeights(model).write(anchor(weights, 0))
    return model


@torch.no_grad()
def recomputed(model: Any, prompt: Any, tokens: Any) -> np.ndarray:
    """[len(tokens)] logprobs of `tokens` after `prompt` by one forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    return picked(model(ids).logits[0, len(prompt) - 1 : -1], list(tokens))


@torch.no_grad()
def on_old_keys(models: list[Any], ends: list[int], prompt: Any, tokens: Any) -> np.ndarray:
    """Logprobs where model i sampled up to tokens[:ends[i]] on top of the keys and values of those before it.

    The last token before a change of weights has not been through the model yet when they change.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    cache, at, start, parts = DynamicCache(), 0, 0, []
    for model, end in zip(models, ends, strict=True):
        upto = len(prompt) + end - 1
        logits = model(ids[:, at:upto], past_key_values=cache, use_cache=True).logits[0]
        parts.append(picked(logits[len(prompt) + start - 1 - at :], list(tokens[start:end])))
        at, start = upto, end
    return np.concatenate(parts)
