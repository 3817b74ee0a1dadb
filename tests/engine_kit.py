"""What the engine tests share: tiny models, updates between two sets of weights, and logprobs by one plain forward."""

import threading

import numpy as np
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from headrace.producers.engines.live_weights import LiveWeights
from headrace.schemas.delta import decode_anchor, decode_delta, encode_anchor, encode_delta
from headrace.schemas.update import WeightUpdate
from headrace.schemas.weight_hash import set_hash

VOCAB = 37
Weights = dict[str, np.ndarray]


def tiny_model(seed: int = 0, *, dtype: torch.dtype = torch.float32, tied: bool = True) -> Qwen3ForCausalLM:
    """A random Qwen3 of some ten thousand parameters whose distributions are far from uniform."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM takes on a CPU
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    LiveWeights(model).round_to_bf16()
    return model


def bits_of(model: torch.nn.Module) -> Weights:
    return {name: bits.copy() for name, bits in LiveWeights(model).bits().items()}


def perturbed(weights: Weights, seed: int) -> Weights:
    """As after a (large) step: some elements move by some ulps."""
    rng = np.random.default_rng(seed)
    new = {name: bits.copy() for name, bits in weights.items()}
    for bits in new.values():
        flat = bits.reshape(-1)
        where = rng.random(len(flat)) < 0.4
        flat[where] += rng.integers(1, 30, int(where.sum())).astype(np.uint16)
    return new


def delta(base: Weights, new: Weights, version: int) -> WeightUpdate:
    """The update from version - 1, through bytes."""
    made = encode_delta(base, new, base_version=version - 1, version=version)
    assert made.weights_hash == set_hash(new)
    return decode_delta(made.blob, base, base_version=version - 1, version=version)


def anchor(weights: Weights, version: int) -> WeightUpdate:
    return decode_anchor(encode_anchor(weights, version), version=version)


def model_with(weights: Weights, *, tied: bool = True) -> Qwen3ForCausalLM:
    """A plain float32 model that holds `weights`."""
    model = tiny_model(tied=tied)
    LiveWeights(model).write(anchor(weights, 0))
    return model


@torch.no_grad()
def recomputed(model, prompt, tokens, *, temperature: float = 1.0) -> np.ndarray:
    """[len(tokens)] logprobs of `tokens` after `prompt` by one forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return picked(logits, tokens)


@torch.no_grad()
def continued(old, new, prompt, tokens, switch: int) -> np.ndarray:
    """Logprobs of tokens[switch:] under `new` on top of the keys and values that `old` left behind.

    When the weights change after `switch` tokens, the last of them has not been through the model yet.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    kept = len(prompt) + switch - 1
    cache = DynamicCache()
    old(ids[:, :kept], past_key_values=cache, use_cache=True)
    logits = new(ids[:, kept:-1], past_key_values=cache, use_cache=True).logits[0]
    return picked(logits, tokens[switch:])


def picked(logits: torch.Tensor, tokens) -> np.ndarray:
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def reached(engine, count: int) -> threading.Event:
    """Set between two steps, once some request of a TransformersEngine has `count` tokens."""
    event = threading.Event()

    def look() -> None:
        if max(engine._manager.progress().values(), default=0) >= count:
            event.set()
        else:
            engine._manager.between_steps(look)

    engine._manager.between_steps(look)
    return event
