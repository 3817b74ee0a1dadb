"""The trainer's weights as bf16 bits, one tensor at a time: what is published of a float32 master."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from ...schemas.dtypes import Dtype
from ...schemas.rounding import CHUNK, rounded
from ...schemas.weight_hash import tensor_hash
from .shards import Span


class Source(Protocol):
    """The weights as the trainer has them: this rank's rows."""

    @property
    def spans(self) -> Mapping[str, Span]:
        """Name -> which part of the whole tensor is here."""

    def values(self, name: str) -> np.ndarray:
        """Of one tensor's rows: float32, to be rounded to bf16, or its bf16 bits (uint16). Not written to."""


class RoundedRows(Mapping[str, np.ndarray]):
    """Name -> bf16 bits of the rows that are here, made when they are asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, name: str) -> np.ndarray:
        return rounded_rows(self._source, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.spans)

    def __len__(self) -> int:
        return len(self._source.spans)


def rounded_rows(source: Source, name: str, out: np.ndarray | None = None) -> np.ndarray:
    """One tensor's rows as bf16 bits (uint16): a copy, or written into `out`."""
    values = source.values(name)
    bits = np.empty(values.shape, dtype=np.uint16) if out is None else out
    flat, target = values.reshape(-1), bits.reshape(-1)
    if values.dtype == np.uint16:
        target[:] = flat
        return bits
    for at in range(0, len(flat), CHUNK):
        target[at : at + CHUNK] = rounded(flat[at : at + CHUNK], Dtype.BF16)
    return bits


def row_hashes(source: Source) -> dict[str, int]:
    """Name -> what the rows that are here add to the tensor's rolling hash."""
    return {
        name: tensor_hash(rounded_rows(source, name), Dtype.BF16, span.start)
        for name, span in source.spans.items()
    }
