"""A version becomes blobs: each rank encodes its own part, tensor by tensor, and stores it; nothing is gathered but
where the parts lie and what they add to the hashes, and from that every rank makes the same weight record.

The bits of the newest version that is in the log are kept (2 bytes a parameter): the next delta goes on top of
them. They change when a version is `settle`d, so an encoding that fails, or a record that does not get into the
log, leaves them as they were.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...schemas.anchor import write_anchor
from ...schemas.delta import Change, write_delta
from ...schemas.dtypes import Dtype
from ...schemas.errors import BlobError
from ...schemas.weight_hash import shapes_hash, sum_hashes
from ...schemas.weights import BlobKind, WeightBlob, WeightRecord
from ...streams import metrics
from ...streams.blobs import BlobRef, BlobStore
from .bits import RoundedRows, Source, rounded_rows, row_hashes
from .orders import Order, tell
from .team import Alone, Team, together

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)
"""Pauses between attempts to store a blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a rank tells the others of its part of a version."""

    hashes: dict[str, int]
    """What it adds to each tensor's rolling hash."""
    changed: int = 0
    """Elements."""
    blob: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A version that is stored, and not yet in the log."""

    version: int
    source: Source
    hashes: dict[str, int]
    weights_hash: int


class Emitter:
    """One rank's part of every version of a policy, in order. Its methods are called on all ranks alike."""

    def __init__(
        self,
        store: BlobStore,
        policy_id: str,
        *,
        anchor_every: int,
        team: Team | None = None,
        threads: int = 1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._policy_id = store, policy_id
        self._anchor_every, self._threads, self._sleep = anchor_every, threads, sleep
        self._team: Team = Alone() if team is None else team
        self._version, self._weights_hash = -1, 0
        self._bits: dict[str, np.ndarray] = {}
        self._hashes: dict[str, int] = {}
        self._pending: _Pending | None = None

    @property
    def weights_hash(self) -> int:
        """Of the newest version in the log, whole."""
        return self._weights_hash

    def stand_at(self, version: int, source: Source) -> None:
        """The log's newest version is `version`, with the weights of `source`: the next delta goes on top of it."""
        tell(self._team, Order.STAND, lambda: str(version).encode())
        hashes = row_hashes(source)
        parts = [json.loads(p) for p in self._team.exchange(json.dumps(hashes).encode())]
        shapes = {name: span.shape for name, span in source.spans.items()}
        self._bits = {name: rounded_rows(source, name) for name in source.spans}
        self._version, self._hashes, self._pending = version, hashes, None
        self._weights_hash = shapes_hash(shapes, sum_hashes(parts))

    def encode(self, source: Source, *, anchor: bool = False) -> WeightRecord:
        """The next version's record with its blobs stored, not yet sent: the same on every rank.

        The first version is an anchor; every `anchor_every`-th has one beside its delta; `anchor`: only an anchor.
        Raises BlobError where a blob could not be stored, and TeamError on the ranks where it could; what this rank
        stands on is untouched then. `source` must stay as it is until `settle`.
        """
        tell(self._team, Order.ENCODE, lambda: b"anchor" if anchor else b"")
        version = self._version + 1
        alone = version == 0 or anchor
        told = together(self._team, lambda: self._part(source, version, alone))
        parts = [_Part(**json.loads(t)) for t in told]
        shapes = {name: span.shape for name, span in source.spans.items()}
        weights_hash = shapes_hash(shapes, sum_hashes(p.hashes for p in parts))
        blobs = [_blob(p.blob) for p in parts if p.blob is not None]
        metrics.delta_bytes.inc(sum(b.size for b in blobs))
        if alone or version % self._anchor_every == 0:
            told = together(self._team, lambda: self._anchor(source, version, weights_hash))
            blobs += [_blob(json.loads(t)) for t in told]
        self._pending = _Pending(version, source, parts[self._team.rank].hashes, weights_hash)
        total = sum(math.prod(shape) for shape in shapes.values())
        return WeightRecord(
            policy_id=self._policy_id,
            version=version,
            base_version=None if alone else version - 1,
            base_hash=None if alone else self._weights_hash,
            weights_hash=weights_hash,
            blobs=tuple(blobs),
            changed_elements=total if alone else sum(p.changed for p in parts),
            total_elements=total,
            full_bytes=total * Dtype.BF16.bits.itemsize,
            created_ms=int(time.time() * 1000),
        )

    def settle(self) -> None:
        """The version that was encoded last is in the log: its bits are what the next delta goes on top of."""
        pending = self._pending
        if pending is None:
            return
        tell(self._team, Order.SETTLE)
        for name, h in pending.hashes.items():
            if self._hashes.get(name) != h:
                self._bits[name] = rounded_rows(pending.source, name, self._bits.get(name))
        self._version, self._weights_hash = pending.version, pending.weights_hash
        self._hashes, self._pending = pending.hashes, None

    def put(self, kind: BlobKind, version: int, data: bytes) -> WeightBlob:
        """Store one blob of `version` that is not cut into shards. Raises BlobError."""
        return self._store_as(kind, version, (0, 1), lambda stem: self._store.put_stream(stem, [data]))

    def _part(self, source: Source, version: int, alone: bool) -> bytes:
        """Store this rank's delta, if there is one."""
        if alone:
            return _json(_Part(hashes=row_hashes(source)))
        with _scratch() as file:
            totals = write_delta(
                file,
                self._changes(source),
                base_version=self._version,
                version=version,
                shard=self._team.rank,
                shards=self._team.size,
                threads=self._threads,
            )
            blob = self._upload(file, BlobKind.DELTA, version)
        return _json(_Part(hashes=dict(totals.hashes), changed=totals.changed, blob=asdict(blob)))

    def _changes(self, source: Source) -> Iterator[Change]:
        for name in sorted(source.spans):
            span = source.spans[name]
            yield Change(
                name=name,
                old=self._bits[name],
                new=source.values(name),
                dtype=Dtype.BF16,
                shape=span.shape,
                flat_offset=span.start,
                base_hash=self._hashes[name],
            )

    def _anchor(self, source: Source, version: int, weights_hash: int) -> bytes:
        """Store all of this rank's rows."""
        places = {name: (s.shape, s.start) for name, s in source.spans.items()}
        cut = places if self._team.size > 1 else None
        with _scratch() as file:
            write_anchor(file, RoundedRows(source), version, weights_hash, places=cut)
            blob = self._upload(file, BlobKind.ANCHOR, version)
        return json.dumps(asdict(blob)).encode()

    def _upload(self, file: BinaryIO, kind: BlobKind, version: int) -> WeightBlob:
        """Store a file of this rank's; streamed, under a name that holds its hash."""
        file.flush()
        shard = (self._team.rank, self._team.size)
        return self._store_as(kind, version, shard, lambda stem: self._store.put_file(stem, Path(file.name)))

    def _store_as(
        self, kind: BlobKind, version: int, shard: tuple[int, int], put: Callable[[str], BlobRef]
    ) -> WeightBlob:
        number, count = shard
        place = f"-{number}of{count}" if count > 1 else ""
        stem = f"weights/{self._policy_id}/v{version:06d}-{kind}{place}"
        for pause in (*RETRY_SECONDS, None):
            try:
                ref = put(stem)
                return WeightBlob(
                    kind=kind, uri=ref.name, size=ref.size, sha256=ref.sha256, shard=number, shards=count
                )
            except BlobError as e:
                if pause is None:
                    raise
                logger.warning("blob %s not stored, again in %.1f s: %s", stem, pause, e)
                self._sleep(pause)
        raise AssertionError("unreachable")


@contextlib.contextmanager
def _scratch() -> Iterator[BinaryIO]:
    """A temporary file, on disk: a model's anchor is as large as the model. Raises BlobError."""
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder, open(f"{folder}/blob", "wb") as file:
            yield file
    except OSError as e:
        raise BlobError(
            f"a version cannot be prepared in {tempfile.gettempdir()}: {e}; set TMPDIR to a folder with room"
        ) from e


def _blob(told: Mapping[str, Any]) -> WeightBlob:
    return WeightBlob(**{**told, "kind": BlobKind(told["kind"])})


def _json(part: _Part) -> bytes:
    return json.dumps(asdict(part)).encode()
