"""Attention of a packed batch over the paged cache, request by request, for the CPU.

transformers' own paged attention without a flash kernel scores every query of the batch against every key of
the batch and masks what belongs to other requests, at a cost that grows with the square of the number of
requests. Here requests of like lengths are gathered into one padded call, so each only meets its own keys.
Same arithmetic otherwise. Full causal attention only: the caller keeps other models on the stock kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "paged|headrace"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests that share one call; R requests, Q queries and K keys each (keys padded)."""

    queries: torch.Tensor
    """[R * Q] positions in the packed queries."""
    keys: torch.Tensor
    """[R * K] positions in the packed keys."""
    shape: tuple[int, int, int]
    """R, Q, K."""
    mask: torch.Tensor | None
    """bool [R or 1, 1, Q or 1, K]; True where a query may look. None: everywhere."""


def supports(config: Any) -> bool:
    """True for models whose layers all use plain full attention."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


def register() -> None:
    """Make the attention known to transformers under NAME. Repeating it is fine."""
    AttentionInterface.register(NAME, forward)


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]; writes the cache."""
    lengths_q, lengths_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    keys, values = kwargs["cache"].update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    _, heads, tokens, size = query.shape
    groups = keys.shape[1]
    flat = query[0].transpose(0, 1)
    out = torch.empty((1, tokens, heads, size), dtype=query.dtype)
    for bucket in _plan(lengths_q, lengths_k):
        r, q, k = bucket.shape
        # Query heads that share a key head stand beside each other as queries: no copy of the keys is needed.
        asked = flat[bucket.queries].view(r, q, groups, heads // groups, size).permute(0, 2, 3, 1, 4)
        asked = asked.reshape(r, groups, -1, size)
        seen_keys = keys[bucket.keys].view(r, k, groups, size).transpose(1, 2)
        seen_values = values[bucket.keys].view(r, k, groups, size).transpose(1, 2)
        mask = bucket.mask
        if mask is not None and q > 1:
            mask = mask.repeat(1, 1, heads // groups, 1)
        mixed = scaled_dot_product_attention(asked, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        mixed = mixed.view(r, groups, heads // groups, q, size).permute(0, 3, 1, 2, 4)
        out[0, bucket.queries] = mixed.reshape(r * q, heads, size)
    return out, None


def _plan(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[Bucket]:
    """The buckets of one step; computed in its first layer and kept on the tensor that describes the step."""
    plan = getattr(cu_q, "headrace_plan", None)
    if plan is None:
        plan = _buckets(cu_q.long(), cu_k.long())
        cu_q.headrace_plan = plan  # type: ignore[attr-defined]
    return plan


def _buckets(cu_q: torch.Tensor, cu_k: torch.Tensor) -> list[Bucket]:
    starts_q, starts_k = cu_q[:-1], cu_k[:-1]
    sizes_q, sizes_k = cu_q.diff(), cu_k.diff()
    members: dict[tuple[int, int], list[int]] = {}
    for i, (q, k) in enumerate(zip(sizes_q.tolist(), sizes_k.tolist(), strict=True)):
        # Decoding requests share a call up to the next power of two; prefills only with their equals.
        members.setdefault((1, 1 << (k - 1).bit_length()) if q == 1 else (q, k), []).append(i)
    buckets = []
    for (q, _), indices in members.items():
        rows = torch.tensor(indices)
        lengths = sizes_k[rows]
        k = int(lengths.max())
        steps = torch.arange(k)
        inside = steps < lengths[:, None]
        keys = torch.where(inside, starts_k[rows, None] + steps, 0)
        if q == 1:
            mask = None if bool(inside.all()) else inside[:, None, None, :]
        else:
            mask = (steps <= torch.arange(k - q, k)[:, None])[None, None]
        queries = starts_q[rows, None] + torch.arange(q)
        buckets.append(Bucket(queries.reshape(-1), keys.reshape(-1), (len(indices), q, k), mask))
    return buckets
