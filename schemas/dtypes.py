"""The number formats that weights travel in, as bit patterns: bf16, fp16 and fp32."""

from __future__ import annotations

from enum import StrEnum

import numpy as np


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
