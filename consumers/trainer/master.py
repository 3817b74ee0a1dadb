"""The fp32 master weights under AdamW, and the bf16 values that everybody else sees.

Without an fp32 master nearly all of a small update is lost to rounding; without bf16-rounded live weights the
trainer would compute the gradient of a policy that no engine serves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import numpy as np
import torch

from ...schemas.config import TrainerConfig
from ...schemas.weight_hash import tensor_hash
from .shards import cut, local_of, part
from .team import Alone, Team

MOMENTS = ("exp_avg", "exp_avg_sq")


class Master:
    """fp32 copies of this rank's part of the parameters, their optimizer, and their bf16 bits."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], config: TrainerConfig, team: Team | None = None
    ) -> None:
        """`parameters`: name -> version 0 of each whole tensor; this rank's rows are copied."""
        self._config = config
        self._team: Team = Alone() if team is None else team
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.spans = cut(shapes, self._team.rank, self._team.size)
        """Name -> which part of the whole tensor is here."""
        self.weights = {
            n: part(p.detach(), self.spans[n]).float().clone().requires_grad_() for n, p in parameters.items()
        }
        """Name -> this rank's rows, float32."""
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
            weight, grad = self.weights[name], local_of(p.grad)
            if weight.grad is None:
                weight.grad = grad.float()
            else:
                weight.grad += grad
            p.grad = None

    def update(self, version: int) -> tuple[float, bool]:
        """Clip and step towards `version`; returns the gradient norm before clipping, and whether it was finite.

        A gradient that is not finite is thrown away: the weights and the moments stay as they are.
        """
        norm = self._gradient_norm()
        finite = math.isfinite(norm)
        if finite:
            torch.nn.utils.clip_grads_with_norm_(
                self.weights.values(), self._config.grad_clip, torch.tensor(norm)
            )
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self._config, version)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, finite

    @torch.no_grad()
    def write_to(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the live `parameters` with the bf16-rounded master."""
        for name, p in parameters.items():
            local_of(p).copy_(self.weights[name].to(torch.bfloat16))

    def values(self, name: str) -> np.ndarray:
        """This rank's rows of one tensor: float32, or their bf16 bits where they are on another device."""
        weight = self.weights[name].detach()
        return weight.numpy() if weight.device.type == "cpu" else bf16_bits(weight)

    def bits(self) -> dict[str, np.ndarray]:
        """Name -> this rank's rows rounded to bf16 (nearest, ties to even), as uint16 bit patterns: a copy."""
        return {name: bf16_bits(w) for name, w in self.weights.items()}

    def hashes(self) -> dict[str, int]:
        """Name -> what this rank's rows add to the tensor's rolling hash."""
        return {n: tensor_hash(bf16_bits(w), start=self.spans[n].start) for n, w in self.weights.items()}

    @torch.no_grad()
    def adopt(self, bits: Mapping[str, np.ndarray]) -> int:
        """Make the rounded master equal `bits` (of this rank's rows); returns how many elements had to be replaced.

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

    def _gradient_norm(self) -> float:
        """Of all ranks' gradients; the sum goes in rank order, so it is the same everywhere and every time."""
        gradients = [w.grad for w in self.weights.values() if w.grad is not None]
        here = float(torch.nn.utils.get_total_norm(gradients))
        norms = self._team.exchange(struct.pack("<d", here))
        return math.hypot(*(struct.unpack("<d", norm)[0] for norm in norms))

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
