"""The fp32 master weights under AdamW, and the bf16 values that everybody else sees.

Without an fp32 master nearly all of a small update is lost to rounding; without bf16-rounded live weights the
trainer would compute the gradient of a policy that no engine serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from ...schemas.config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class Master:
    """fp32 copies of the parameters, their optimizer, and their bf16 bits."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], config: TrainerConfig) -> None:
        """`parameters`: name -> version 0 of each tensor; copied."""
        self._config = config
        self.weights = {n: p.detach().float().clone().requires_grad_() for n, p in parameters.items()}
        self.optimizer = torch.optim.AdamW(
            self.weights.values(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def add_gradients(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Move the gradients of the live `parameters` here, adding to what earlier micro-batches left."""
        for name, p in parameters.items():
            if p.grad is None:
                continue
            weight = self.weights[name]
            if weight.grad is None:
                weight.grad = p.grad.float()
            else:
                weight.grad += p.grad
            p.grad = None

    def update(self, version: int) -> tuple[float, bool]:
        """Clip and step towards `version`; returns the gradient norm before clipping, and whether it was finite.

        A gradient that is not finite is thrown away: the weights and the moments stay as they are.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), self._config.grad_clip))
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._config, version)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, finite

    @torch.no_grad()
    def write_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the live `parameters` with the bf16-rounded master."""
        for name, p in parameters.items():
            p.copy_(self.weights[name].to(torch.bfloat16))

    def bits(self) -> dict[str, np.ndarray]:
        """Name -> the master rounded to bf16 (nearest, ties to even), as uint16 bit patterns of its shape."""
        return {name: bf16_bits(w) for name, w in self.weights.items()}

    @torch.no_grad()
    def adopt(self, bits: Mapping[str, np.ndarray]) -> int:
        """Make the rounded master equal `bits`; returns how many elements had to be replaced.

        Elements that round to their bits already keep the digits that bf16 cannot hold.
        """
        replaced = 0
        for name, weight in self.weights.items():
            wanted = torch.from_numpy(bits[name].reshape(tuple(weight.shape)).view(np.int16).copy())
            different = bf16_view(weight) != wanted
            replaced += int(different.sum())
            values = wanted.view(torch.bfloat16).float().to(weight.device)
            weight.copy_(torch.where(different.to(weight.device), values, weight))
        return replaced

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint keeps, by name; the moments are absent before the first step."""
        kept = {f"master/{n}": w.detach() for n, w in self.weights.items()}
        for name, weight in self.weights.items():
            state = self.optimizer.state.get(weight, {})
            if state:
                kept |= {f"{moment}/{name}": state[moment] for moment in MOMENTS}
                kept[f"step/{name}"] = state["step"].reshape(1)
        return kept

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`. KeyError or ValueError when they are another model's."""
        for name, weight in self.weights.items():
            saved = tensors[f"master/{name}"]
            if saved.shape != weight.shape:
                raise ValueError(f"{name} is {tuple(saved.shape)}, the model has {tuple(weight.shape)}")
            weight.copy_(saved)
            self.optimizer.state.pop(weight, None)
            if f"step/{name}" in tensors:
                self.optimizer.state[weight] = {
                    "step": tensors[f"step/{name}"].reshape(()).clone().to(weight.device),
                    **{m: tensors[f"{m}/{name}"].clone().to(weight.device) for m in MOMENTS},
                }


def learning_rate(config: TrainerConfig, version: int) -> float:
    """Of the step that makes `version` (1 is the first): linear warm-up, then constant."""
    return config.lr * min(1.0, version / max(1, config.warmup_steps))


def bf16_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bf16 rounding of `tensor` as int16 bit patterns on the CPU."""
    return tensor.detach().to(torch.bfloat16).cpu().view(torch.int16)


def bf16_bits(tensor: torch.Tensor) -> np.ndarray:
    """The bf16 rounding of `tensor` as uint16 bit patterns of its shape."""
    return bf16_view(tensor).numpy().view(np.uint16)
