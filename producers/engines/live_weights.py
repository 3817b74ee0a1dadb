"""The parameters of a running torch model as bit patterns: read, written in place, looked at, hashed.

Names are those of `named_parameters()`, tied weights once. bfloat16 and float16 storage take their own format,
float32 takes fp32 or bf16, which it holds as rounded values; the bits that came in are the bits that come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...schemas.dtypes import Dtype
from ...schemas.errors import WeightUpdateError
from ...schemas.update import TensorPatch, WeightUpdate, check_same_tensors, unknown_tensor
from ...schemas.weight_hash import MASK, entry_hash, tensor_hash

_TAKES = {
    torch.bfloat16: (Dtype.BF16,),
    torch.float16: (Dtype.FP16,),
    torch.float32: (Dtype.BF16, Dtype.FP32),
}
"""Storage -> the formats that it holds without loss."""
_SLICE = 1 << 22
"""Elements looked at once: a whole large tensor would be copied by looking at it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One patch, ready to be written: nothing is left to do but to move its bits."""

    name: str
    target: torch.Tensor
    """The live parameter, flat, as integers of its width; shares its memory."""
    indices: torch.Tensor | None
    """int64 [n] on the same device; None: everywhere."""
    values: torch.Tensor
    """[n] integers; for a whole tensor of bf16 in float32 storage still narrow (int16)."""


class LiveWeights:
    """A model's parameters, by name."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._formats: dict[str, Dtype] = {}
        for name, parameter in self._parameters.items():
            parameter.requires_grad_(False)
            if parameter.dtype not in _TAKES:
                raise WeightUpdateError(
                    "dtype", f"{name} is {parameter.dtype}, expected one of {', '.join(map(str, _TAKES))}"
                )
            if not parameter.is_contiguous():
                raise WeightUpdateError("layout", f"{name} is not contiguous")
            self._formats[name] = _TAKES[parameter.dtype][0]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {name: tuple(p.shape) for name, p in self._parameters.items()}

    def round_to_bf16(self) -> None:
        """Round float32 storage to values that bf16 can hold."""
        for parameter in self._parameters.values():
            if parameter.dtype is torch.float32:
                parameter.data.copy_(parameter.data.to(torch.bfloat16))

    def check(self, update: WeightUpdate) -> None:
        """WeightUpdateError unless every patch fits; writes nothing."""
        if update.base_version is None:
            check_same_tensors(self.shapes, {p.name: p.shape for p in update.patches})
        for patch in update.patches:
            if patch.name not in self._parameters:
                raise WeightUpdateError("unknown_tensor", unknown_tensor(patch.name, self._parameters))
            parameter = self._parameters[patch.name]
            if patch.shape != tuple(parameter.shape):
                raise WeightUpdateError(
                    "shape", f"{patch.name} is {list(parameter.shape)}, given {list(patch.shape)}"
                )
            if patch.dtype not in _TAKES[parameter.dtype] or (
                patch.indices is not None and patch.dtype is not self._formats[patch.name]
            ):
                raise WeightUpdateError(
                    "dtype",
                    f"{patch.name} is {parameter.dtype} of {self._formats[patch.name]}, given {patch.dtype}",
                )

    def prepare(self, update: WeightUpdate) -> tuple[Prepared, ...]:
        """Check `update` and make it ready to be written. Raises WeightUpdateError; writes nothing."""
        self.check(update)
        return tuple(_prepared(patch, self._parameters[patch.name].data) for patch in update.patches)

    def write(self, update: WeightUpdate, prepared: Sequence[Prepared] | None = None) -> None:
        """Write every patch in place; `prepared`: what `prepare` made of it, else made here."""
        for item in self.prepare(update) if prepared is None else prepared:
            if item.indices is None:
                _write_whole(item)
            else:
                # scatter_ takes two thirds of index_copy_'s time here.
                item.target.scatter_(0, item.indices, item.values)
        self._formats.update((p.name, p.dtype) for p in update.patches)

    def verify(self, update: WeightUpdate, prepared: Sequence[Prepared] | None = None) -> None:
        """WeightUpdateError(`live_bits`) unless the live weights hold what `update` says, wherever it says something."""
        for item in self.prepare(update) if prepared is None else prepared:
            if item.indices is None:
                same = _whole_is_same(item)
            else:
                same = torch.equal(item.target.index_select(0, item.indices), item.values)
            if not same:
                raise WeightUpdateError("live_bits", f"{item.name} does not hold what was written")

    def bits(self) -> dict[str, np.ndarray]:
        """Name -> bits in the parameter's shape; copies unless they are stored on the CPU as they are.

        Raises WeightUpdateError if float32 storage holds a value that bf16 cannot.
        """
        return {name: _bits(name, p.data, self._formats[name]) for name, p in self._parameters.items()}

    def hash(self) -> int:
        """Rolling hash (uint64) of everything."""
        # Tensor by tensor, so that no second copy of the model exists.
        parts = (
            entry_hash(name, tuple(p.shape), tensor_hash(_bits(name, p.data, kind), kind))
            for (name, p), kind in zip(self._parameters.items(), self._formats.values(), strict=True)
        )
        return sum(parts) & MASK


def _prepared(patch: TensorPatch, parameter: torch.Tensor) -> Prepared:
    bits = np.ascontiguousarray(patch.bits)
    widened = parameter.dtype is torch.float32 and patch.dtype is Dtype.BF16 and patch.indices is not None
    if widened:
        # Moved as integers: a float copy may change the payload of a NaN.
        bits = bits.astype(np.uint32) << 16
    # torch knows few unsigned integers; torch also warns of arrays that it could write into but must not.
    signed = bits.view(np.int16 if bits.itemsize == 2 else np.int32)
    values = torch.from_numpy(signed if signed.flags.writeable else signed.copy())
    indices = None
    if patch.indices is not None:
        where = patch.indices.astype(np.int64, copy=False)
        indices = torch.from_numpy(where if where.flags.writeable else where.copy()).to(parameter.device)
    target = parameter.view(-1).view(torch.int32 if parameter.element_size() == 4 else torch.int16)
    return Prepared(patch.name, target, indices, values.to(parameter.device))


def _write_whole(item: Prepared) -> None:
    if item.values.element_size() == item.target.element_size():
        item.target.copy_(item.values)
        return
    for at in range(0, len(item.target), _SLICE):
        item.target[at : at + _SLICE] = item.values[at : at + _SLICE].to(torch.int32) << 16


def _whole_is_same(item: Prepared) -> bool:
    if item.values.element_size() == item.target.element_size():
        return torch.equal(item.target, item.values)
    return all(
        torch.equal(item.target[at : at + _SLICE], item.values[at : at + _SLICE].to(torch.int32) << 16)
        for at in range(0, len(item.target), _SLICE)
    )


def _bits(name: str, tensor: torch.Tensor, kind: Dtype) -> np.ndarray:
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    wide = tensor.view(torch.int32).cpu().numpy().view(np.uint32)
    if kind is Dtype.FP32:
        return wide
    if (wide & 0xFFFF).any():
        raise WeightUpdateError("not_bf16", f"{name} holds a value that bf16 cannot")
    return (wide >> 16).astype(np.uint16)
