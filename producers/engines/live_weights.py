"""The parameters of a running torch model as bf16 bit patterns: read, written in place, hashed.

Names are those of `named_parameters()`, tied weights once. Storage is bfloat16, or float32 that holds
bf16-rounded values; either way the bits that came in are the bits that come out.
"""

from __future__ import annotations

import numpy as np
import torch

from ...schemas.errors import WeightUpdateError
from ...schemas.update import TensorPatch, WeightUpdate, check_same_tensors, unknown_tensor
from ...schemas.weight_hash import MASK, entry_hash, tensor_hash


class LiveWeights:
    """A model's parameters, by name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(False)
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise WeightUpdateError("dtype", f"{name} is {parameter.dtype}, expected float32 or bfloat16")
            if not parameter.is_contiguous():
                raise WeightUpdateError("layout", f"{name} is not contiguous")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {name: tuple(p.shape) for name, p in self._parameters.items()}

    def round_to_bf16(self) -> None:
        """Round float32 storage to values that bf16 can hold."""
        for parameter in self._parameters.values():
            parameter.data.copy_(parameter.data.to(torch.bfloat16))

    def check(self, update: WeightUpdate) -> None:
        """WeightUpdateError unless every patch fits; writes nothing."""
        if update.base_version is None:
            check_same_tensors(self.shapes, {p.name: p.shape for p in update.patches})
        for patch in update.patches:
            if patch.name not in self._parameters:
                raise WeightUpdateError("unknown_tensor", unknown_tensor(patch.name, self._parameters))
            if patch.shape != tuple(self._parameters[patch.name].shape):
                raise WeightUpdateError(
                    "shape",
                    f"{patch.name} is {list(self._parameters[patch.name].shape)}, given {patch.shape}",
                )

    def write(self, update: WeightUpdate) -> None:
        """Write every patch in place; `check` has passed."""
        for patch in update.patches:
            _write(self._parameters[patch.name].data.view(-1), patch)

    def bits(self) -> dict[str, np.ndarray]:
        """Name -> uint16 bits in the parameter's shape; copies unless stored as bfloat16 on the CPU.

        Raises WeightUpdateError if float32 storage holds a value that bf16 cannot.
        """
        return {name: _bits(name, p.data) for name, p in self._parameters.items()}

    def hash(self) -> int:
        """Rolling hash (uint64) of everything."""
        # Tensor by tensor, so that no second copy of the model exists.
        parts = (
            entry_hash(name, tuple(p.shape), tensor_hash(_bits(name, p.data)))
            for name, p in self._parameters.items()
        )
        return sum(parts) & MASK


def _write(flat: torch.Tensor, patch: TensorPatch) -> None:
    if flat.dtype is torch.bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(patch.bits).view(np.int16)).to(flat.device)
        target = flat.view(torch.int16)
    else:
        widened = patch.bits.astype(np.uint32) << 16
        # Moved as integers: a float copy may change the payload of a NaN.
        values = torch.from_numpy(widened.view(np.int32)).to(flat.device)
        target = flat.view(torch.int32)
    if patch.indices is None:
        target.copy_(values)
    else:
        target.index_copy_(0, torch.from_numpy(patch.indices).to(flat.device), values)


def _bits(name: str, tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    wide = tensor.view(torch.int32).cpu().numpy().view(np.uint32)
    if (wide & 0xFFFF).any():
        raise WeightUpdateError("not_bf16", f"{name} holds a value that bf16 cannot")
    return (wide >> 16).astype(np.uint16)
