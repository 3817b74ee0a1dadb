"""From version to version: blobs fetched as mappings, decoded, checked and applied to one copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..schemas.anchor import decode_anchor_shards
from ..schemas.delta import apply_update, decode_shards
from ..schemas.dtypes import Dtype
from ..schemas.errors import WeightUpdateError
from ..schemas.update import WeightUpdate, weights_of
from ..schemas.weights import BlobKind, WeightRecord
from ..streams.blobs import BlobRef, BlobStore


class Walker:
    """Weights that stand at one version."""

    def __init__(self, store: BlobStore, *, threads: int = 1) -> None:
        self._store, self._threads = store, threads
        self.version: int | None = None
        """None: nowhere."""
        self.weights_hash: int | None = None
        self.bits: dict[str, np.ndarray] = {}
        """Tensor name -> bit patterns in the tensor's shape."""
        self.dtypes: dict[str, Dtype] = {}
        self.hashes: dict[str, int] = {}

    def anchor(self, record: WeightRecord) -> WeightUpdate:
        """`record`'s anchor, decoded and checked against the record. Raises BlobError, WeightUpdateError."""
        return decode_anchor_shards(
            self.fetch(record, BlobKind.ANCHOR), version=record.version, weights_hash=record.weights_hash
        )

    def load(self, record: WeightRecord, update: WeightUpdate | None = None) -> None:
        """Stand at `record`, by its anchor (`update`, where it is decoded already)."""
        update = update or self.anchor(record)
        self.bits, self.hashes = weights_of(update), dict(update.hashes)
        self.dtypes = {p.name: p.dtype for p in update.patches}
        self._stand(record)

    def step(self, record: WeightRecord) -> None:
        """From the base of `record` to it, by its delta. Raises BlobError, WeightUpdateError."""
        update = self.peek(record)
        apply_update(self.bits, update)
        self.hashes.update(update.hashes)
        self._stand(record)

    def peek(self, record: WeightRecord) -> WeightUpdate:
        """The delta of `record`, decoded and checked against where this stands, which stays as it is."""
        if self.version != record.base_version or self.weights_hash != record.base_hash:
            raise WeightUpdateError(
                "base_hash",
                f"version {record.version} goes on top of other weights than those of {self.version}",
            )
        assert record.base_version is not None
        return decode_shards(
            self.fetch(record, BlobKind.DELTA),
            self.bits,
            base_version=record.base_version,
            version=record.version,
            base_hashes=self.hashes,
            weights_hash=record.weights_hash,
            dtypes=self.dtypes,
            threads=self._threads,
        )

    def follow(
        self, chain: Sequence[WeightRecord], done: Callable[[WeightRecord], object] = lambda _: None
    ) -> None:
        """Load the first of `chain` and take a step to each other; `done` is told of each."""
        self.load(chain[0])
        done(chain[0])
        for record in chain[1:]:
            self.step(record)
            done(record)

    def fetch(self, record: WeightRecord, kind: BlobKind) -> list[memoryview]:
        """Every shard of one kind, checked against its SHA-256. Raises BlobError."""
        return [self._store.mapped(BlobRef(b.uri, b.size, b.sha256)) for b in record.blobs_of(kind)]

    def _stand(self, record: WeightRecord) -> None:
        self.version, self.weights_hash = record.version, record.weights_hash


def differing(bits: dict[str, np.ndarray], update: WeightUpdate) -> Iterable[str]:
    """Names of the tensors of an anchor's `update` that differ from `bits` in any bit."""
    for patch in update.patches:
        mine = bits.get(patch.name)
        if mine is None or not np.array_equal(mine.reshape(-1), patch.bits):
            yield patch.name
    yield from bits.keys() - {p.name for p in update.patches}
