"""Deltas of a real fine-tune: AdamW on the fp32 master of a small model, its bf16 bits published after every step."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...schemas.delta import Change, apply_update, decode_delta, write_delta
from ...schemas.dtypes import Dtype
from ...schemas.errors import WeightUpdateError
from ...schemas.rounding import rounded
from ...schemas.weight_hash import tensor_hashes

_VOCABULARY, _ROWS, _LENGTH = 2048, 4, 64


def finetune(*, steps: int, lr: float, seed: int = 0) -> dict[str, Any]:
    """Bytes a step against a full bf16 copy, over `steps` policy-gradient steps at learning rate `lr`.

    Every delta is decoded and applied to a replica, which must end with the trainer's bits (else WeightUpdateError).
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            initializer_range=0.02,
            tie_word_embeddings=True,
        )
    ).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    masters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    base = {n: rounded(w.reshape(-1), Dtype.BF16).reshape(w.shape) for n, w in masters.items()}
    replica = {n: b.copy() for n, b in base.items()}
    hashes: Mapping[str, int] = tensor_hashes(base)
    held = dict(hashes)
    elements = sum(b.size for b in base.values())
    sizes, shares = [], []
    for version in range(1, steps + 1):
        tokens = torch.randint(0, _VOCABULARY, (_ROWS, _LENGTH))
        advantages = torch.randn(_ROWS)
        logits = model(input_ids=tokens).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        (-(advantages - advantages.mean())[:, None] * logprobs).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sink = io.BytesIO()
        changes = (Change(name=n, old=base[n], new=masters[n], base_hash=hashes[n]) for n in sorted(base))
        totals = write_delta(sink, changes, base_version=version - 1, version=version, update_old=True)
        update = decode_delta(sink.getvalue(), replica, base_version=version - 1, base_hashes=held)
        apply_update(replica, update)
        hashes = totals.hashes
        held |= update.hashes
        sizes.append(len(sink.getvalue()))
        shares.append(totals.changed / elements)
    for name, master in masters.items():
        if not np.array_equal(replica[name].reshape(-1), rounded(master.reshape(-1), Dtype.BF16)):
            raise WeightUpdateError("finetune", f"{name} of the replica is not the trainer's")
    mean = sum(sizes) / len(sizes)
    return {
        "finetune_params": elements,
        "finetune_steps": steps,
        "finetune_lr": lr,
        "finetune_changed_first": shares[0],
        "finetune_changed_last": shares[-1],
        "finetune_bytes_per_step": mean,
        "finetune_bytes_last_step": sizes[-1],
        "finetune_full_bytes": 2 * elements,
        "finetune_ratio": 2 * elements / mean,
    }
