"""The subscriber's own copy of the bits: what a delta is decoded against, and what live weights are checked with.

It costs the model's size once more in the host's memory (2 bytes a parameter for bf16). It runs ahead of the
engine while an update is staged, and goes back where the engine refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...schemas.anchor import decode_anchor_shards
from ...schemas.delta import compose, decode_shards
from ...schemas.dtypes import Dtype
from ...schemas.update import TensorPatch, WeightUpdate, apply_update, weights_of
from ...schemas.weights import BlobKind, WeightRecord

_Undo = tuple[str, np.ndarray | None, np.ndarray]
"""Tensor, flat positions (None: all), the bits that stood there."""


class Replica:
    """Bits and hashes of the newest staged version."""

    def __init__(self) -> None:
        self._bits: dict[str, np.ndarray] = {}
        self._hashes: dict[str, int] = {}
        self._dtypes: dict[str, Dtype] = {}
        self._undo: list[_Undo] = []
        self._old_hashes: dict[str, int] = {}
        self._from_anchor = False

    @property
    def empty(self) -> bool:
        """True before the first anchor."""
        return not self._bits

    def begin(self) -> None:
        """The bits are what is live: from here on `undo` comes back to them."""
        self._undo, self._old_hashes, self._from_anchor = [], dict(self._hashes), False

    def stage(self, record: WeightRecord, kind: BlobKind, shards: Sequence[bytes]) -> WeightUpdate:
        """Decode the blobs of `record`, check them, and take their bits over. Raises WeightUpdateError, changing nothing.

        No blobs: a delta that changes nothing.
        """
        if kind is BlobKind.ANCHOR:
            return self._stage_anchor(record, shards)
        assert record.base_version is not None
        if not shards:
            return unchanged(record)
        update = decode_shards(
            shards,
            self._bits,
            base_version=record.base_version,
            version=record.version,
            base_hashes=self._hashes,
            weights_hash=record.weights_hash,
            dtypes=self._dtypes,
        )
        if not self._from_anchor:
            self._remember(update)
        apply_update(self._bits, update)
        self._hashes.update(update.hashes)
        return update

    def undo(self) -> bool:
        """Back to what was live at `begin`; False where an anchor has replaced it all."""
        if self._from_anchor:
            return False
        for name, indices, old in reversed(self._undo):
            self._bits[name].reshape(-1)[slice(None) if indices is None else indices] = old
        self._hashes, self._undo = dict(self._old_hashes), []
        return True

    @property
    def names(self) -> list[str]:
        """Every tensor's."""
        return list(self._bits)

    def size(self, names: Iterable[str]) -> int:
        """Bytes of these tensors."""
        return sum(self._bits[name].nbytes for name in names)

    def whole(self, version: int, weights_hash: int) -> WeightUpdate:
        """All bits as an anchor's update; its arrays are views that change with the next `stage`."""
        return WeightUpdate(
            version=version,
            patches=tuple(self._patch(name) for name in self._bits),
            weights_hash=weights_hash,
            hashes=dict(self._hashes),
        )

    def some(self, names: Iterable[str], version: int, weights_hash: int) -> WeightUpdate:
        """The bits of these tensors as an update of `version` to itself; views like those of `whole`."""
        return WeightUpdate(
            version=version,
            base_version=version,
            patches=tuple(self._patch(name) for name in names),
            weights_hash=weights_hash,
            hashes={name: self._hashes[name] for name in names},
        )

    def _patch(self, name: str) -> TensorPatch:
        bits = self._bits[name]
        return TensorPatch(
            name=name, shape=bits.shape, indices=None, bits=bits.reshape(-1), dtype=self._dtypes[name]
        )

    def composed(self, updates: Sequence[WeightUpdate]) -> WeightUpdate:
        """One update with the effect of the staged `updates` in their order."""
        if self._from_anchor:
            return self.whole(updates[-1].version, updates[-1].weights_hash)
        return compose(updates)

    def _stage_anchor(self, record: WeightRecord, shards: Sequence[bytes]) -> WeightUpdate:
        update = decode_anchor_shards(
            shards,
            version=record.version,
            weights_hash=record.weights_hash,
            shapes={name: bits.shape for name, bits in self._bits.items()} or None,
        )
        self._bits, self._hashes = weights_of(update), dict(update.hashes)
        self._dtypes = {patch.name: patch.dtype for patch in update.patches}
        self._undo, self._from_anchor = [], True
        return update

    def _remember(self, update: WeightUpdate) -> None:
        for patch in update.patches:
            flat = self._bits[patch.name].reshape(-1)
            old = flat.copy() if patch.indices is None else flat[patch.indices]
            self._undo.append((patch.name, patch.indices, old))


def unchanged(record: WeightRecord) -> WeightUpdate:
    """The update to a version that has its base's bits."""
    return WeightUpdate(
        version=record.version,
        base_version=record.base_version,
        patches=(),
        weights_hash=record.weights_hash,
    )
