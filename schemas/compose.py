"""Several updates become one: the shards of one version side by side, or consecutive versions one after another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from .dtypes import Dtypes
from .errors import WeightUpdateError
from .update import TensorPatch, Weights, WeightUpdate, expect
from .weight_hash import MASK, replace_entry, set_hash, tensor_hashes


def merge(
    updates: Sequence[WeightUpdate],
    base: Weights,
    *,
    base_hashes: Mapping[str, int] | None = None,
    weights_hash: int | None = None,
    dtypes: Dtypes | None = None,
) -> WeightUpdate:
    """The update that `updates` make together, each by itself an update of a part of `base` to one version.

    `weights_hash`: what the weight record promises. Raises WeightUpdateError where two of them write one element,
    or where the hashes do not add up to it.
    """
    first = _first(updates)
    hashes = tensor_hashes(base, dtypes) if base_hashes is None else base_hashes
    for other in updates[1:]:
        expect("version", other.version, first.version)
        if other.base_version != first.base_version:
            raise WeightUpdateError("base_version", f"{other.base_version} beside {first.base_version}")
    patches, after = [], {}
    total = set_hash(base, hashes)
    for name, parts in _by_name(updates).items():
        patches.append(_side_by_side(parts))
        steps = (u.hashes[name] - hashes[name] for u in updates if name in u.hashes)
        after[name] = (hashes[name] + sum(steps)) & MASK
        total = replace_entry(total, name, parts[0].shape, hashes[name], after[name])
    if weights_hash is not None:
        expect("result_hash", total, weights_hash)
    return WeightUpdate(
        version=first.version,
        base_version=first.base_version,
        patches=tuple(patches),
        weights_hash=total,
        hashes=after,
    )


def compose(updates: Sequence[WeightUpdate]) -> WeightUpdate:
    """One update that does what consecutive `updates` do one after another; the first may be an anchor's.

    Raises WeightUpdateError where one does not go on top of the one before it.
    """
    first = _first(updates)
    for before, after in itertools.pairwise(updates):
        if after.base_version != before.version:
            raise WeightUpdateError(
                "base_version",
                f"version {after.version} goes on {after.base_version}, not on {before.version}",
            )
    if len(updates) == 1:
        return first
    hashes: dict[str, int] = {}
    for update in updates:
        hashes.update(update.hashes)
    return WeightUpdate(
        version=updates[-1].version,
        base_version=first.base_version,
        patches=tuple(_one_after_another(parts) for parts in _by_name(updates).values()),
        weights_hash=updates[-1].weights_hash,
        hashes=hashes,
    )


def _first(updates: Sequence[WeightUpdate]) -> WeightUpdate:
    if not updates:
        raise WeightUpdateError("no_updates", "nothing to put together")
    return updates[0]


def _by_name(updates: Sequence[WeightUpdate]) -> dict[str, list[TensorPatch]]:
    found: dict[str, list[TensorPatch]] = {}
    for update in updates:
        for patch in update.patches:
            same = found.setdefault(patch.name, [])
            if same and (same[0].shape, same[0].dtype) != (patch.shape, patch.dtype):
                raise WeightUpdateError("shape", f"{patch.name} has two shapes or formats")
            same.append(patch)
    return found


def _side_by_side(parts: list[TensorPatch]) -> TensorPatch:
    if len(parts) == 1:
        return parts[0]
    listed = [p.indices for p in parts if p.indices is not None]
    if len(listed) < len(parts):
        raise WeightUpdateError("overlap", f"{parts[0].name}: one shard replaces all of it")
    # Shards come in the order of their ranges, mostly: then nothing needs to be sorted.
    indices, bits = np.concatenate(listed), np.concatenate([p.bits for p in parts])
    if (indices[1:] <= indices[:-1]).any():
        order = np.argsort(indices, kind="stable")
        indices, bits = indices[order], bits[order]
        if (indices[1:] == indices[:-1]).any():
            raise WeightUpdateError("overlap", f"{parts[0].name}: two shards write one element")
    return _patch(parts[0], indices, bits)


def _one_after_another(parts: list[TensorPatch]) -> TensorPatch:
    start = max((i for i, p in enumerate(parts) if p.indices is None), default=None)
    if start is not None:
        later = parts[start + 1 :]
        if not later:
            return parts[start]
        bits = parts[start].bits.copy()
        for p in later:
            bits[p.indices] = p.bits
        return _patch(parts[0], None, bits)
    if len(parts) == 1:
        return parts[0]
    indices = np.concatenate([p.indices for p in parts if p.indices is not None])
    # Stable, so the last of equal positions is the last writer; merges the runs, each of which is sorted.
    order = np.argsort(indices, kind="stable")
    indices = indices[order]
    last = np.append(indices[1:] != indices[:-1], True)
    return _patch(parts[0], indices[last], np.concatenate([p.bits for p in parts])[order[last]])


def _patch(like: TensorPatch, indices: np.ndarray | None, bits: np.ndarray) -> TensorPatch:
    return TensorPatch(name=like.name, shape=like.shape, indices=indices, bits=bits, dtype=like.dtype)
