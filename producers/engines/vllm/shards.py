"""The hash of a set of weights from what each rank of an engine holds of them.

A tensor's hash is a sum over its elements (schemas/weight_hash.py), so boxes add up; ranks that hold the same box
must agree on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ....schemas.dtypes import Dtype
from ....schemas.errors import WeightUpdateError
from ....schemas.weight_hash import MASK, shapes_hash, tensor_hash


def box_hash(
    shape: Sequence[int], low: Sequence[int], high: Sequence[int], bits: np.ndarray, dtype: Dtype
) -> int:
    """What the box [low, high) of a tensor of `shape` adds to its hash; `bits` in the box's shape."""
    sizes = [h - l for l, h in zip(low, high, strict=True)]  # noqa: E741
    # The longest tail of axes that the box fills lies in one run, together with its part of the axis before.
    axis = len(shape)
    while axis > 0 and sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    outer, run = max(axis - 1, 0), math.prod(sizes[max(axis - 1, 0) :])
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(l * s for l, s in zip(low, strides, strict=True))  # noqa: E741
    starts = np.full(1, base, dtype=np.int64)
    for size, stride in zip(sizes[:outer], strides[:outer], strict=True):
        starts = (starts[:, None] + np.arange(size) * stride).reshape(-1)
    runs = np.ascontiguousarray(bits).reshape(len(starts), run)
    return sum(tensor_hash(r, dtype, start=int(s)) for r, s in zip(runs, starts, strict=True)) & MASK


def combined_hash(ranks: Iterable[Sequence[Any]]) -> int:
    """Hash (uint64) of the set, from [name, shape, dtype, [[low, high, hash]]] of every rank.

    WeightUpdateError(`ranks`): they disagree, or do not hold every element.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], int]] = {}
    for tensors in ranks:
        for name, shape, _, held in tensors:
            if shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise WeightUpdateError("ranks", f"{name} has two shapes")
            for low, high, value in held:
                known = boxes.setdefault(name, {}).setdefault((tuple(low), tuple(high)), int(value))
                if known != int(value):
                    raise WeightUpdateError("ranks", f"{name}: two ranks hold different weights")
    hashes = {}
    for name, shape in shapes.items():
        held = boxes.get(name, {})
        count = sum(math.prod(h - l for l, h in zip(*box, strict=True)) for box in held)  # noqa: E741
        if count != math.prod(shape):
            raise WeightUpdateError(
                "ranks", f"{name}: {count} of {math.prod(shape)} elements are held by some rank"
            )
        hashes[name] = sum(held.values()) & MASK
    return shapes_hash(shapes, hashes)
