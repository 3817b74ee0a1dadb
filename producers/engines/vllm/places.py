"""Where the elements of a checkpoint's tensor lie in an engine's own parameters: the arithmetic alone, in numpy.

An engine fuses what a checkpoint names one by one (q, k and v; gate and up; experts) and cuts it between its
ranks. A `Place` says for one rank which boxes of a tensor it holds, and where each lies in which parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of a checkpoint tensor, and the part of a parameter that holds it."""

    parameter: str
    low: tuple[int, ...]
    high: tuple[int, ...]
    """The box is [low, high) along each axis of the checkpoint tensor."""
    offset: int
    """Flat position, in the parameter, of the box's first element."""
    strides: tuple[int, ...]
    """Elements of the parameter between two neighbours along each axis of the box."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(h - l for l, h in zip(self.low, self.high, strict=True))  # noqa: E741

    @property
    def count(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)

    @property
    def box(self) -> tuple[slice, ...]:
        """To index the checkpoint tensor with."""
        return tuple(slice(l, h) for l, h in zip(self.low, self.high, strict=True))  # noqa: E741


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One checkpoint tensor on one rank."""

    shape: tuple[int, ...]
    """In the checkpoint, whole."""
    blocks: tuple[Block, ...]
    """Disjoint boxes."""


def locate(place: Place, indices: np.ndarray) -> Iterator[tuple[Block, np.ndarray, slice | np.ndarray]]:
    """For each block (block, positions, chosen): parameter.flat[positions] holds tensor.flat[indices[chosen]].

    `indices` [n] int64: sorted, unique, in range. `positions` [m] int64.
    """
    for block in place.blocks:
        row = math.prod(place.shape[1:])
        if block.low[1:] == (0,) * (len(place.shape) - 1) and block.high[1:] == place.shape[1:]:
            # Whole rows: a run of the sorted indices.
            first, last = np.searchsorted(indices, (block.low[0] * row, block.high[0] * row))
            chosen: slice | np.ndarray = slice(int(first), int(last))
        else:
            chosen = np.flatnonzero(_inside(block, place.shape, indices))
        mine = indices[chosen]
        if not len(mine):
            continue
        if block.strides == contiguous_strides(place.shape):
            start = sum(l * s for l, s in zip(block.low, block.strides, strict=True))  # noqa: E741
            yield block, mine + (block.offset - start), chosen
            continue
        positions = np.full(len(mine), block.offset, dtype=np.int64)
        for at, low, stride in zip(
            np.unravel_index(mine, place.shape), block.low, block.strides, strict=True
        ):
            positions += (at - low) * stride
        yield block, positions, chosen


def _inside(block: Block, shape: tuple[int, ...], indices: np.ndarray) -> np.ndarray:
    inside = np.ones(len(indices), dtype=bool)
    for at, low, high in zip(np.unravel_index(indices, shape), block.low, block.high, strict=True):
        inside &= (at >= low) & (at < high)
    return inside


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each axis of a C-ordered array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def whole(parameter: str, shape: tuple[int, ...]) -> Place:
    """A tensor that the engine keeps as it is."""
    block = Block(
        parameter=parameter, low=(0,) * len(shape), high=shape, offset=0, strides=contiguous_strides(shape)
    )
    return Place(shape=shape, blocks=(block,))


def part(
    parameter: str,
    shape: tuple[int, ...],
    *,
    axis: int,
    low: int,
    high: int,
    into: tuple[int, ...],
    at: int = 0,
    base: int = 0,
) -> Block:
    """`shape`'s [low, high) along `axis`, from row `at` of that axis on in a C-ordered parameter of shape `into`.

    `base`: flat position at which `into` begins inside the parameter (an expert's matrix in the stack of them).
    """
    strides = contiguous_strides(into)
    lows, highs = [0] * len(shape), list(shape)
    lows[axis], highs[axis] = low, high
    return Block(
        parameter=parameter,
        low=tuple(lows),
        high=tuple(highs),
        offset=base + at * strides[axis],
        strides=strides,
    )
