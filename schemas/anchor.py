"""Anchors: all tensors of a version as a safetensors file of BF16 tensors, which any tool can open.

The header's metadata names the version and the rolling hash of the set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import safetensors

from .errors import WeightUpdateError
from .update import TensorPatch, Weights, WeightUpdate, check_same_tensors, expect
from .weight_hash import set_hash, tensor_hashes

ANCHOR_FORMAT = "headrace-anchor/1"


def encode_anchor(weights: Weights, version: int, weights_hash: int | None = None) -> bytes:
    """All of `weights` as the bytes of a safetensors file; `weights_hash`: their set hash where it is known."""
    total = set_hash(weights) if weights_hash is None else weights_hash
    metadata = {"format": ANCHOR_FORMAT, "version": str(version), "weights_hash": str(total)}
    header: dict[str, object] = {"__metadata__": metadata}
    parts, at = [], 0
    for name, bits in sorted(weights.items()):
        data = np.ascontiguousarray(bits, dtype="<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(bits.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    # Written by hand: the library's own writer changed its interface within the versions we accept.
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def decode_anchor(
    blob: bytes,
    *,
    version: int | None = None,
    weights_hash: int | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> WeightUpdate:
    """The update that replaces everything. Raises WeightUpdateError.

    `version`, `weights_hash`: what the weight record promises. `shapes`: the tensors that must be there.
    """
    try:
        tensors = safetensors.deserialize(blob)
        size = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + size]).get("__metadata__") or {}
        stated_version, stated_hash = int(metadata["version"]), int(metadata["weights_hash"])
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as e:
        raise WeightUpdateError("not_an_anchor", f"{type(e).__name__}: {e}") from None
    if metadata.get("format") != ANCHOR_FORMAT:
        raise WeightUpdateError("format", f"{metadata.get('format')!r}, expected {ANCHOR_FORMAT}")
    expect("version", stated_version, stated_version if version is None else version)
    weights: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        if tensor["dtype"] != "BF16":
            raise WeightUpdateError("dtype", f"{name} is {tensor['dtype']}, expected BF16")
        weights[name] = np.frombuffer(tensor["data"], dtype=np.uint16).reshape(tensor["shape"])
    if shapes is not None:
        check_same_tensors(shapes, {n: b.shape for n, b in weights.items()})
    hashes = tensor_hashes(weights)
    total = set_hash(weights, hashes)
    expect("result_hash", total, stated_hash)
    expect("weights_hash", total, total if weights_hash is None else weights_hash)
    patches = (
        TensorPatch(name=name, shape=bits.shape, indices=None, bits=bits.reshape(-1))
        for name, bits in sorted(weights.items())
    )
    return WeightUpdate(version=stated_version, patches=tuple(patches), weights_hash=total, hashes=hashes)
