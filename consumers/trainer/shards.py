"""Which part of each tensor a rank holds: a run of the flat tensor, as FSDP2 cuts it along the first dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from ...schemas.errors import ConfigError

T = TypeVar("T", torch.Tensor, np.ndarray)


@dataclass(frozen=True, slots=True)
class Span:
    """A rank's part of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Flat position of the first element."""
    length: int
    """Elements; 0 where the tensor has fewer rows than there are ranks before this one."""


def span_of(name: str, parameter: torch.Tensor, size: int) -> Span:
    """The part of `parameter` that this of `size` ranks holds. ConfigError for a cut other than FSDP2's."""
    from torch.distributed.tensor import DTensor, Shard

    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        if size > 1:
            raise ConfigError(f"{name} is whole on every rank: give its module to fully_shard")
        return Span(shape, 0, parameter.numel())
    mesh = parameter.device_mesh
    if parameter.placements != (Shard(0),):
        raise ConfigError(f"{name} is placed as {parameter.placements}; only (Shard(0),) can be published")
    begin, end = rows_of(shape[0], mesh.get_local_rank(), mesh.size())
    if parameter.to_local().shape[0] != end - begin:
        raise ConfigError(f"{name}: {parameter.to_local().shape[0]} rows here, {end - begin} expected")
    return _rows(shape, begin, end)


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """[begin, end) of the rows that `rank` of `size` holds: as torch.chunk cuts, the last ranks may have none."""
    step = -(-rows // size)
    return min(rank * step, rows), min((rank + 1) * step, rows)


def cut(shapes: Mapping[str, tuple[int, ...]], rank: int, size: int) -> dict[str, Span]:
    """Name -> the part of `rank` of `size`."""
    return {name: _rows(shape, *rows_of(shape[0], rank, size)) for name, shape in shapes.items()}


def spans_of(parameters: Mapping[str, torch.Tensor], size: int) -> dict[str, Span]:
    """Name -> this rank's part."""
    return {name: span_of(name, p, size) for name, p in parameters.items()}


def part(whole: T, span: Span) -> T:
    """The rows of a whole tensor (torch's or numpy's) that `span` says; they share its memory."""
    width = max(math.prod(span.shape[1:]), 1)
    begin = span.start // width
    return whole[begin : begin + span.length // width]


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part as a plain tensor that shares its memory."""
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _rows(shape: tuple[int, ...], begin: int, end: int) -> Span:
    width = math.prod(shape[1:])
    return Span(tuple(shape), begin * width if end > begin else 0, (end - begin) * width)
