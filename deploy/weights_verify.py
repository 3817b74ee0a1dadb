"""Every blob fetched and checked, and the weights followed from the oldest anchor to the newest version.

An anchor that a chain of deltas reaches must hold the same bits as the chain: two ways, one result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..schemas.errors import BlobError, WeightUpdateError
from ..schemas.weights import BlobKind, WeightRecord
from ..streams.blobs import BlobRef, BlobStore
from ..streams.retention import plan_cleanup
from .weights_log import Catalog
from .weights_walk import Walker, differing


@dataclass(slots=True)
class Verified:
    """What was found."""

    versions: int = 0
    blobs: int = 0
    """Fetched, each equal to its SHA-256."""
    bytes: int = 0
    chained: int = 0
    """Versions whose weights were put together and have the hash of their record."""
    anchors: int = 0
    """Anchors that decode and have the hash of their record."""
    both_ways: int = 0
    """Anchors whose bits are those that the deltas before them lead to."""
    collected: int = 0
    """Blobs that are gone and that nothing needs any more."""
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True without any problem."""
        return not self.problems


def verify(
    catalog: Catalog, store: BlobStore, *, done: Callable[[WeightRecord], object] = lambda _: None
) -> Verified:
    """Check all of `catalog`; what is wrong is in the result, and the next anchor is where it goes on."""
    return _Verification(catalog, store).run(done)


class _Verification:
    def __init__(self, catalog: Catalog, store: BlobStore) -> None:
        self._catalog, self._store, self._walker = catalog, store, Walker(store)
        self._found = Verified(versions=len(catalog.records))
        floor = plan_cleanup(catalog.records.values(), catalog.present, ()).floor
        self._floor = 0 if floor is None else floor
        """What is gone above it was not collected."""

    def run(self, done: Callable[[WeightRecord], object]) -> Verified:
        before: WeightRecord | None = None
        if self._catalog.unreadable:
            self._problem(f"{self._catalog.unreadable} records of the topic cannot be read")
        for record in self._catalog.records.values():
            self._links(before, record)
            gone = set(self._catalog.missing(record))
            self._samples(record, gone)
            self._delta(record, gone)
            self._anchor(record, gone)
            self._jumps(record)
            before = record
            done(record)
        return self._found

    def _links(self, before: WeightRecord | None, record: WeightRecord) -> None:
        if before is not None and record.version != before.version + 1:
            self._problem(f"the log has no version between {before.version} and {record.version}")
        elif before is not None and record.has_delta and record.base_hash != before.weights_hash:
            self._problem(
                f"version {record.version} goes on top of other weights than those of {before.version}"
            )

    def _samples(self, record: WeightRecord, gone: set[str]) -> None:
        lists = record.blobs_of(BlobKind.SAMPLES)
        for name in (b.uri for b in lists if b.uri in gone):
            self._problem(f"version {record.version}: its list of samples {name} is not in the store")
        if lists and not gone & {b.uri for b in lists}:
            self._check(f"version {record.version}", lambda: self._fetch(record, BlobKind.SAMPLES))

    def _delta(self, record: WeightRecord, gone: set[str]) -> None:
        if not record.has_delta or self._is_gone(record, BlobKind.DELTA, gone):
            return
        reachable = (
            self._walker.version == record.base_version and self._walker.weights_hash == record.base_hash
        )
        action = (
            (lambda: self._walker.step(record))
            if reachable
            else (lambda: self._fetch(record, BlobKind.DELTA))
        )
        if self._check(f"version {record.version}", action) and reachable:
            self._count(record, BlobKind.DELTA)
            self._found.chained += 1

    def _anchor(self, record: WeightRecord, gone: set[str]) -> None:
        if not record.has_anchor or self._is_gone(record, BlobKind.ANCHOR, gone):
            return
        by_chain = self._walker.version == record.version

        def look() -> None:
            update = self._walker.anchor(record)
            self._found.anchors += 1
            self._count(record, BlobKind.ANCHOR)
            if by_chain:
                wrong = sorted(differing(self._walker.bits, update))
                if wrong:
                    raise WeightUpdateError(
                        "anchor_differs", f"from what the deltas lead to: {', '.join(wrong[:5])}"
                    )
                self._found.both_ways += 1
            else:
                self._walker.load(record, update)
                self._found.chained += 1

        self._check(f"version {record.version}", look)

    def _jumps(self, base: WeightRecord) -> None:
        """Compacted deltas from here on."""
        for jump in (j for j in self._catalog.jumps if j.base_version == base.version):
            self._check(f"the compacted delta {jump.blobs[0].uri}", partial(self._jump, jump))

    def _jump(self, jump: WeightRecord) -> None:
        if self._walker.version != jump.base_version:
            self._fetch(jump, BlobKind.DELTA)
            return
        self._walker.peek(jump)
        self._count(jump, BlobKind.DELTA)

    def _is_gone(self, record: WeightRecord, kind: BlobKind, gone: set[str]) -> bool:
        names = [b.uri for b in record.blobs_of(kind) if b.uri in gone]
        for name in names:
            if record.version >= self._floor:
                self._problem(f"version {record.version}: {name} is not in the store, or has another size")
            else:
                self._found.collected += 1
        return bool(names)

    def _fetch(self, record: WeightRecord, kind: BlobKind) -> None:
        for b in record.blobs_of(kind):
            self._store.mapped(BlobRef(b.uri, b.size, b.sha256))
        self._count(record, kind)

    def _count(self, record: WeightRecord, kind: BlobKind) -> None:
        self._found.blobs += len(record.blobs_of(kind))
        self._found.bytes += sum(b.size for b in record.blobs_of(kind))

    def _check(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except (BlobError, WeightUpdateError) as e:
            self._problem(f"{what}: {e}")
            return False
        return True

    def _problem(self, text: str) -> None:
        self._found.problems.append(text)
