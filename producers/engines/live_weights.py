"""The parameters of a running torch model as bit patterns: read, written in place, looked at, hashed.

Names are those of `named_parameters()`, tied weights once. bfloat16 and float16 storage take their own format,
float32 takes fp32 or bf16, which it holds as rounded values; the bits that came in are the bits that come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
_PIECE = 1 << 14
"""Elements written and looked at in one go, on the CPU: with what lies between them at 1 % they fill half a cache."""
_WHOLE_PIECE = 1 << 18
"""The same where every element is written."""


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

    def pieces(self) -> Iterator[Prepared]:
        """The same, cut into parts that are quick to look at again."""
        size = _WHOLE_PIECE if self.indices is None else _PIECE
        if self.target.device.type != "cpu" or len(self.values) <= size:
            yield self
            return
        for at in range(0, len(self.values), size):
            part = slice(at, at + size)
            if self.indices is None:
                yield Prepared(self.name, self.target[part], None, self.values[part])
            else:
                yield Prepared(self.name, self.target, self.indices[part], self.values[part])

    def write(self) -> None:
        """Into the live parameter."""
        if self.indices is None:
            self.target.copy_(self._wide())
        else:
            # scatter_ takes two thirds of index_copy_'s time here.
            self.target.scatter_(0, self.indices, self.values)

    def holds(self) -> bool:
        """Whether the live parameter has these bits."""
        if self.indices is not None:
            return torch.equal(self.target.index_select(0, self.indices), self.values)
        live, values = self.target, self._wide()
        if live.nbytes % 8 == 0 and all(t.data_ptr() % 8 == 0 for t in (live, values)):
            live, values = live.view(torch.int64), values.view(torch.int64)  # compared in a third of the time
        return torch.equal(live, values)

    def _wide(self) -> torch.Tensor:
        if self.values.element_size() == self.target.element_size():
            return self.values
        return self.values.to(torch.int32) << 16


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

    def write(self, update: WeightUpdate, prepared: Sequence[Prepared] | None = None) -> str | None:
        """Write every patch in place and read it back; `prepared`: what `prepare` made of it, else made here.

        Returns the first tensor that does not hold what was written into it, if any.
        """
        wrong = None
        for item in self.prepare(update) if prepared is None else prepared:
            # Piece by piece: what was just written is looked at while it is still in the cache.
            for piece in item.pieces():
                piece.write()
                if wrong is None and not piece.holds():
                    wrong = item.name
        self._formats.update((p.name, p.dtype) for p in update.patches)
        return wrong

    def verify(self, update: WeightUpdate, prepared: Sequence[Prepared] | None = None) -> None:
        """WeightUpdateError(`live_bits`) unless the live weights hold what `update` says, wherever it says something."""
        for item in self.prepare(update) if prepared is None else prepared:
            if not all(piece.holds() for piece in item.pieces()):
                raise not_what_was_written(item.name)

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


def not_what_was_written(name: str) -> WeightUpdateError:
    """What a look at the live weights may find."""
    return WeightUpdateError("live_bits", f"{name} does not hold what was written")


def _bits(name: str, tensor: torch.Tensor, kind: Dtype) -> np.ndarray:
    if tensor.element_size() == 2:
        return tensor.view(torch.int16).cpu().numpy().view(np.uint16)
    wide = tensor.view(torch.int32).cpu().numpy().view(np.uint32)
    if kind is Dtype.FP32:
        return wide
    if (wide & 0xFFFF).any():
        raise WeightUpdateError("not_bf16", f"{name} holds a value that bf16 cannot")
    return (wide >> 16).astype(np.uint16)
