"""The number formats that weights travel in, as bit patterns: bf16, fp16 and fp32."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from .errors import WeightUpdateError


class Dtype(StrEnum):
    """How one tensor's elements are stored."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bits(self) -> np.dtype:
        """The unsigned integers that hold its bit patterns: uint16 or uint32."""
        return np.dtype(np.uint32 if self is Dtype.FP32 else np.uint16)

    @property
    def safetensors(self) -> str:
        """Its name in a safetensors header."""
        return {Dtype.BF16: "BF16", Dtype.FP16: "F16", Dtype.FP32: "F32"}[self]


Dtypes = Mapping[str, Dtype]
"""Tensor name -> its format; a name that is not there is bf16 if its bits are uint16, fp32 if they are uint32."""


def dtype_of(name: str, bits: np.ndarray, dtypes: Dtypes | None = None) -> Dtype:
    """The format of tensor `name`, held as `bits`. WeightUpdateError if they do not go together."""
    given = None if dtypes is None else dtypes.get(name)
    if given is None:
        given = Dtype.FP32 if bits.dtype == np.uint32 else Dtype.BF16
    if bits.dtype != given.bits:
        raise WeightUpdateError("dtype", f"{name} is {given}, held as {bits.dtype}; expected {given.bits}")
    return given
