"""An update of weights, decoded and checked: what crosses from the codecs to an engine or a trainer.

Weights are a mapping from tensor name (the safetensors one; tied weights once) to its bit patterns (uint16 for
bf16 and fp16, uint32 for fp32; in the tensor's shape, C order).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .dtypes import Dtype
from .errors import WeightUpdateError

Weights = Mapping[str, np.ndarray]
"""Tensor name -> bit patterns (uint16 or uint32) in the tensor's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPatch:
    """What one tensor becomes: `bits` at flat positions `indices`, or everywhere."""

    name: str
    shape: tuple[int, ...]
    indices: np.ndarray | None
    """[n] int64, sorted, unique, in range; None: `bits` holds the whole tensor."""
    bits: np.ndarray
    """[n] or [prod(shape)] bit patterns: `dtype.bits`."""
    dtype: Dtype = Dtype.BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A whole update, decoded and checked, ready to be written."""

    version: int
    patches: tuple[TensorPatch, ...]
    weights_hash: int
    """Rolling hash (uint64) that the live weights must have afterwards."""
    base_version: int | None = None
    """What it goes on top of; None: every tensor is replaced."""
    hashes: Mapping[str, int] = field(default_factory=dict)
    """Tensor hash, afterwards, of each tensor that is patched."""


def apply_update(weights: Mapping[str, np.ndarray], update: WeightUpdate) -> None:
    """Write `update` into `weights`, whose arrays must be writable and C-contiguous."""
    for patch in update.patches:
        flat = weights[patch.name].reshape(-1)
        flat[slice(None) if patch.indices is None else patch.indices] = patch.bits


def weights_of(update: WeightUpdate) -> dict[str, np.ndarray]:
    """The tensors of an anchor's update, as writable copies."""
    return {p.name: p.bits.reshape(p.shape).copy() for p in update.patches if p.indices is None}


def check_same_tensors(known: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    """WeightUpdateError unless `given` has exactly the names and shapes of `known`."""
    for name in given:
        if name not in known:
            raise WeightUpdateError("unknown_tensor", unknown_tensor(name, known))
    for name, shape in known.items():
        if name not in given:
            raise WeightUpdateError("missing_tensor", name)
        if tuple(given[name]) != tuple(shape):
            raise WeightUpdateError("shape", f"{name} is {list(shape)}, given {list(given[name])}")


def unknown_tensor(name: str, known: Iterable[str]) -> str:
    """`name` and the known names that are nearest to it."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"{name}; {'nearest: ' + ', '.join(near) if near else f'{len(names)} others are known'}"


def expect(reason: str, found: int | None, expected: int | None, name: str = "") -> None:
    """WeightUpdateError(reason) unless `found` is `expected`."""
    if found != expected:
        raise WeightUpdateError(reason, f"{name + ': ' if name else ''}{found}, expected {expected}")
