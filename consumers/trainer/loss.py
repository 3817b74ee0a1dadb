"""Token log-probabilities, and the policy-gradient loss with truncated importance sampling.

    loss = sum over masked tokens of ( -min(rho, C) * A * l  -  c_H * H ) / N

l: trainer log-probability; rho = exp(clamp(l - b, -20, 20)), detached; b: behaviour log-probability; H: entropy;
N: masked tokens of the whole batch, over all micro-batches. Finite whatever b is; a token outside the mask adds
exactly 0 to the loss and to every gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One micro-batch, flat over tokens."""

    logprobs: torch.Tensor
    """[N] float32 with gradient: log-probabilities under the weights being updated."""
    entropy: torch.Tensor
    """[N] float32 with gradient, nats."""
    behaviour: torch.Tensor
    """[N] float32: log-probabilities under the weights that sampled; any value, also -inf or NaN."""
    advantages: torch.Tensor
    """[N] float32."""
    mask: torch.Tensor
    """[N] bool: tokens that are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over masked tokens, so that micro-batches add up with `+`."""

    tokens: float = 0.0
    loss: float = 0.0
    """Already divided by the batch's token count."""
    entropy: float = 0.0
    kl: float = 0.0
    """k3 = expm1(d) - d with d = l - b (Schulman 2020): KL(behaviour || trainer) over sampled tokens."""
    weights: float = 0.0
    squared_weights: float = 0.0
    clipped: float = 0.0
    weight_max: float = 0.0

    def __add__(self, other: LossStats) -> LossStats:
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMS}
        return LossStats(**sums, weight_max=max(self.weight_max, other.weight_max))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens; `ess` is (sum rho)^2 / (n sum rho^2), 1.0 when all weights are equal."""
        n = max(self.tokens, 1.0)
        ess = self.weights**2 / (n * self.squared_weights) if self.squared_weights > 0 else 0.0
        return {
            "loss": self.loss,
            "entropy": self.entropy / n,
            "mismatch_kl": self.kl / n,
            "importance_weight_max": self.weight_max,
            "importance_weight_clipped": self.clipped / n,
            "ess": ess,
        }


_SUMS = ("tokens", "loss", "entropy", "kl", "weights", "squared_weights", "clipped")


def token_statistics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each row, both [N] float32.

    `logits`: [N, V] of any float type; `targets`: [N] int64.
    """
    z = logits.float()
    lse = torch.logsumexp(z, dim=-1)
    logprobs = z.gather(-1, targets[:, None]).squeeze(-1) - lse
    entropy = lse - (torch.softmax(z, dim=-1) * z).sum(-1)
    return logprobs, entropy


def log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """l - b without gradient, finite: NaN reads as 0, everything else is clamped to +-20."""
    d = logprobs.detach().float() - behaviour.float()
    return torch.nan_to_num(d, nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


def policy_loss(
    inputs: LossInputs, *, cap: float, entropy_coef: float, normaliser: float
) -> tuple[torch.Tensor, LossStats]:
    """The scalar loss of one micro-batch, and its statistics. `normaliser` is N of the whole batch, > 0."""
    if not (normaliser > 0 and math.isfinite(normaliser)):
        raise ValueError(f"normaliser is {normaliser}")
    d = log_ratio(inputs.logprobs, inputs.behaviour)
    rho = d.exp()
    per_token = -(rho.clamp(max=cap) * inputs.advantages) * inputs.logprobs
    if entropy_coef:
        per_token = per_token - entropy_coef * inputs.entropy
    zero = torch.zeros((), dtype=per_token.dtype, device=per_token.device)
    loss = torch.where(inputs.mask, per_token, zero).sum() / normaliser
    return loss, _stats(inputs, loss, d, rho, cap)


@torch.no_grad()
def _stats(
    inputs: LossInputs, loss: torch.Tensor, d: torch.Tensor, rho: torch.Tensor, cap: float
) -> LossStats:
    mask = inputs.mask
    if not bool(mask.any()):
        return LossStats(loss=loss.item())
    d, rho = d[mask].double(), rho[mask].double()
    values = torch.stack(
        [
            inputs.entropy.detach()[mask].double().sum(),
            (torch.expm1(d) - d).sum(),
            rho.sum(),
            (rho * rho).sum(),
            (rho > cap).double().sum(),
            rho.max(),
            loss.detach().double(),
        ]
    ).tolist()
    entropy, kl, weights, squared, clipped, largest, total = values
    return LossStats(
        tokens=float(d.numel()),
        loss=total,
        entropy=entropy,
        kl=kl,
        weights=weights,
        squared_weights=squared,
        clipped=clipped,
        weight_max=largest,
    )
