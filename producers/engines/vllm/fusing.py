"""Which checkpoint names an engine's layers answer to, and where each tensor lies: from sizes alone, no vLLM needed.

The worker describes its layers with these classes (describe.py); each yields (checkpoint name, Place).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .places import Place, part, whole

Named = Iterator[tuple[str, Place]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One of the matrices that are stacked in a fused layer, by its rows."""

    name: str
    """Checkpoint name without the last part (`weight` or `bias`)."""
    rows: int
    """In the checkpoint."""
    low: int
    high: int
    """What this rank holds of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked:
    """A parameter whose first axis stacks pieces: qkv_proj, gate_up_proj, or one column-parallel layer, an embedding."""

    parameter: str
    leaf: str
    """`weight` or `bias`."""
    pieces: tuple[Piece, ...]
    rest: tuple[int, ...]
    """The other axes: (columns,) of a weight, () of a bias."""

    def places(self) -> Named:
        """In stacking order."""
        at = 0
        total = sum(p.high - p.low for p in self.pieces)
        for piece in self.pieces:
            shape = (piece.rows, *self.rest)
            block = part(
                self.parameter,
                shape,
                axis=0,
                low=piece.low,
                high=piece.high,
                into=(total, *self.rest),
                at=at,
            )
            at += piece.high - piece.low
            yield f"{piece.name}.{self.leaf}", Place(shape=shape, blocks=(block,))

    def held(self) -> dict[str, int]:
        """Parameter -> elements that come from the checkpoint."""
        return {self.parameter: sum(p.high - p.low for p in self.pieces) * math.prod(self.rest)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A row-parallel weight: every rank holds all rows and some columns."""

    parameter: str
    name: str
    rows: int
    columns: int
    low: int
    high: int

    def places(self) -> Named:
        """One."""
        shape = (self.rows, self.columns)
        into = (self.rows, self.high - self.low)
        block = part(self.parameter, shape, axis=1, low=self.low, high=self.high, into=into)
        yield self.name, Place(shape=shape, blocks=(block,))

    def held(self) -> dict[str, int]:
        """Parameter -> elements that come from the checkpoint."""
        return {self.parameter: self.rows * (self.high - self.low)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A parameter that is the checkpoint's tensor."""

    parameter: str
    name: str
    shape: tuple[int, ...]

    def places(self) -> Named:
        """One."""
        yield self.name, whole(self.parameter, self.shape)

    def held(self) -> dict[str, int]:
        """Parameter -> elements that come from the checkpoint."""
        return {self.parameter: math.prod(self.shape)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one layer: w13 [E, 2 * padded, H] holds gate over up, w2 [E, H, padded] down.

    Both namings are known: one tensor per expert, as in checkpoint files, and the stacks of transformers 5
    (gate_up_proj [E, 2I, H], down_proj [E, H, I]).
    """

    w13: str
    w2: str
    name: str
    """Checkpoint name of the experts: `...mlp.experts`."""
    experts: int
    hidden: int
    intermediate: int
    """I, over all ranks."""
    low: int
    high: int
    """What this rank holds of I."""
    padded: int
    """Rows of this rank's gate; not less than high - low."""

    def places(self) -> Named:
        """Per expert, then the two stacks."""
        size = self.high - self.low
        w13 = (self.experts, 2 * self.padded, self.hidden)
        w2 = (self.experts, self.hidden, self.padded)
        narrow, wide = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        for e in range(self.experts):
            base13, base2 = e * w13[1] * w13[2], e * w2[1] * w2[2]
            for leaf, at in (("gate_proj", 0), ("up_proj", self.padded)):
                block = part(
                    self.w13, narrow, axis=0, low=self.low, high=self.high, into=w13[1:], at=at, base=base13
                )
                yield f"{self.name}.{e}.{leaf}.weight", Place(shape=narrow, blocks=(block,))
            block = part(self.w2, wide, axis=1, low=self.low, high=self.high, into=w2[1:], base=base2)
            yield f"{self.name}.{e}.down_proj.weight", Place(shape=wide, blocks=(block,))
        both = (self.experts, 2 * self.intermediate, self.hidden)
        halves = tuple(
            part(self.w13, both, axis=1, low=start + self.low, high=start + self.low + size, into=w13, at=at)
            for start, at in ((0, 0), (self.intermediate, self.padded))
        )
        yield f"{self.name}.gate_up_proj", Place(shape=both, blocks=halves)
        down = (self.experts, self.hidden, self.intermediate)
        block = part(self.w2, down, axis=2, low=self.low, high=self.high, into=w2)
        yield f"{self.name}.down_proj", Place(shape=down, blocks=(block,))

    def held(self) -> dict[str, int]:
        """Parameter -> elements that come from the checkpoint."""
        each = self.experts * (self.high - self.low) * self.hidden
        return {self.w13: 2 * each, self.w2: each}


Layer = Stacked | Columns | Plain | Experts


def name_map(layers: Iterable[Layer]) -> dict[str, Place]:
    """Checkpoint name -> place."""
    return {name: place for layer in layers for name, place in layer.places()}


def uncovered(layers: Iterable[Layer], names: Mapping[str, Place]) -> dict[str, int]:
    """Parameter -> elements that the tensors `names` leave without a value; negative: given more than once.

    Tied tensors lie in the same place and count once.
    """
    missing: dict[str, int] = {}
    for layer in layers:
        missing.update(layer.held())
    blocks = {(b.parameter, b.offset, b.strides, b.sizes): b.count for p in names.values() for b in p.blocks}
    for (parameter, *_), count in blocks.items():
        missing[parameter] -= count
    return {parameter: count for parameter, count in missing.items() if count}
