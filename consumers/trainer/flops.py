"""Model FLOPs of a training step, and the machine's peak measured with a large matrix product.

FLOPs = 6 * N * T + 6 * layers * heads * head_dim * sum of squared lengths (the causal half), N the parameters in
matrix products: the embedding look-up is left out, the output head counts once (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


def matmul_parameters(model: torch.nn.Module) -> int:
    """Parameters that take part in matrix products."""
    total = sum(p.numel() for p in model.parameters())
    tied = model.get_output_embeddings() is None or (  # type: ignore[operator]
        model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    )
    return total if tied else total - model.get_input_embeddings().weight.numel()  # type: ignore[operator]


def training_flops(model: torch.nn.Module, lengths: Sequence[int]) -> float:
    """Forward and backward over sequences of these lengths; recomputation does not count."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 6 * config.num_hidden_layers * heads * head_dim * sum(n * n for n in lengths)
    return 6.0 * matmul_parameters(model) * sum(lengths) + attention


def peak_flops(device: torch.device, dtype: torch.dtype, *, repeats: int = 3) -> float:
    """FLOP/s of the best of a few square matrix products: what `mfu` is measured against."""
    size = 4096 if device.type == "cuda" else 1024
    a = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        product = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        del product
    return 2.0 * size**3 / best
