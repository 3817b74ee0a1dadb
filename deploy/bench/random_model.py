"""A random model in bf16, saved as a Hugging Face directory, and its bits read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def make_model(path: Path, *, hidden: int, layers: int, vocab: int) -> None:
    """A random Qwen3 with tied embeddings, saved."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 192,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def read_bits(path: Path) -> dict[str, np.ndarray]:
    """Name -> uint16 bits of the safetensors files in `path`, writable."""
    return {name: bits.copy() for name, bits in tensors(path)}


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, uint16 bits) of the safetensors files in `path`, one after another; they are mapped, not read."""
    import torch
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as found:
            for name in found.keys():  # noqa: SIM118  (not a mapping)
                yield name, found.get_tensor(name).view(torch.int16).numpy().view(np.uint16)
