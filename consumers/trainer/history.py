"""The weights topic, read to its end: which version is the newest, what made each one, where its bits lie."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from kafka import KafkaConsumer

from ...schemas.anchor import decode_anchor_shards
from ...schemas.delta import apply_update, decode_shards, weights_of
from ...schemas.errors import BrokerError, InvalidMessageError, WeightUpdateError
from ...schemas.weights import WEIGHTS, BlobKind, WeightRecord
from ...streams.blobs import BlobRef, BlobStore
from ...streams.kafka import partitions_of

logger = logging.getLogger(__name__)

KEPT = 2000
"""Records kept besides those since the newest anchor."""


class History:
    """The versions of one policy, as far as the log tells."""

    def __init__(self, records: Iterable[WeightRecord] = ()) -> None:
        self._records: dict[int, WeightRecord] = {}
        self._anchor: int | None = None
        for record in records:
            self.add(record)

    @property
    def newest(self) -> WeightRecord | None:
        """The record of the highest version."""
        return self._records[max(self._records)] if self._records else None

    def get(self, version: int) -> WeightRecord | None:
        """The record of `version`, if it is there and not long past."""
        return self._records.get(version)

    def add(self, record: WeightRecord) -> None:
        """The next record of the topic."""
        self._records[record.version] = record
        if record.has_anchor:
            self._anchor = record.version
        oldest = next(iter(self._records))
        if len(self._records) > KEPT and self._anchor is not None and oldest < self._anchor:
            del self._records[oldest]

    def chain(self, version: int) -> list[WeightRecord]:
        """The newest anchor at or below `version` and the deltas up to it. WeightUpdateError if there is a hole."""
        chain: list[WeightRecord] = []
        for v in range(version, -1, -1):
            record = self._records.get(v)
            if record is None or not (record.has_anchor or record.has_delta):
                raise WeightUpdateError("gap", f"version {v} is not in the log")
            chain.insert(0, record)
            if record.has_anchor:
                return chain
        raise WeightUpdateError("no_anchor", f"no anchor at or below version {version}")


def read_history(consumer: KafkaConsumer, topic: str, *, timeout_s: float = 120.0) -> History:
    """Every record of the weights topic up to its present end. Raises BrokerError."""
    (tp,) = partitions_of(consumer, topic)
    consumer.assign([tp])
    end = consumer.end_offsets([tp])[tp]
    consumer.seek_to_beginning(tp)
    history = History()
    deadline = time.monotonic() + timeout_s
    while consumer.position(tp) < end:
        for records in consumer.poll(timeout_ms=100).values():
            for record in records:
                try:
                    history.add(WEIGHTS.decode(record.value, record.headers))
                except InvalidMessageError as e:
                    logger.warning("weight record left out offset=%d: %s", record.offset, e)
        if time.monotonic() > deadline:
            raise BrokerError(f"{topic} could not be read to its end in {timeout_s:.0f} s")
    return history


def load_bits(
    chain: Sequence[WeightRecord], store: BlobStore, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Name -> uint16 bf16 bits of the chain's last version. Raises WeightUpdateError, BlobError."""
    first = chain[0]
    update = decode_anchor_shards(
        _blobs(first, BlobKind.ANCHOR, store),
        version=first.version,
        weights_hash=first.weights_hash,
        shapes=shapes,
    )
    bits, hashes = weights_of(update), dict(update.hashes)
    for record in chain[1:]:
        update = decode_shards(
            _blobs(record, BlobKind.DELTA, store),
            bits,
            base_version=record.version - 1,
            version=record.version,
            base_hashes=hashes,
            weights_hash=record.weights_hash,
        )
        apply_update(bits, update)
        hashes.update(update.hashes)
    return bits


def _blobs(record: WeightRecord, kind: BlobKind, store: BlobStore) -> list[memoryview]:
    """What each rank stored, in shard order; mapped, because an anchor is as large as the model."""
    return [store.mapped(BlobRef(b.uri, b.size, b.sha256)) for b in record.blobs_of(kind)]
