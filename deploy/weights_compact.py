"""One delta in place of many: from an anchor to a later version, so that who joins late fetches two blobs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..schemas.delta import Change, write_delta
from ..schemas.errors import ConfigError, WeightUpdateError
from ..schemas.weights import BlobKind, WeightRecord
from ..streams.blobs import BlobStore
from ..streams.compacts import compact_stem
from .weights_log import Catalog
from .weights_walk import Walker


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What was written."""

    first: int
    last: int
    name: str
    bytes: int
    replaces: int
    """Deltas that it stands for."""
    replaced_bytes: int
    changed: int
    """Elements that differ between the two versions."""


def compact(
    catalog: Catalog,
    store: BlobStore,
    *,
    first: int | None = None,
    last: int | None = None,
    done: Callable[[WeightRecord], object] = lambda _: None,
) -> Compacted:
    """Write the delta from version `first` (the newest anchor below `last`) to `last` (the newest), and say how large.

    Holds the weights of both versions. Raises ConfigError, BlobError, WeightUpdateError.
    """
    last = catalog.newest if last is None else last
    first = _newest_anchor(catalog, last) if first is None else first
    if first >= last:
        raise ConfigError(f"there is nothing between versions {first} and {last}: --from must be below --to")
    walker = Walker(store)
    walker.follow(catalog.chain(first), done)
    base, base_hashes = {name: bits.copy() for name, bits in walker.bits.items()}, dict(walker.hashes)
    between = [catalog.records[v] for v in range(first + 1, last + 1) if v in catalog.records]
    for record in between:
        if record.version == walker.version:
            continue
        if record.has_delta and record.base_version == walker.version:
            walker.step(record)
        else:
            walker.load(record)  # published again as an anchor
        done(record)
    if walker.version != last:
        raise ConfigError(f"version {last} is not in the log: `headrace weights ls` shows what there is")
    changes = (
        Change(name=n, old=base[n], new=walker.bits[n], dtype=walker.dtypes[n], base_hash=base_hashes[n])
        for n in sorted(base)
    )
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        made = Path(folder) / "delta"
        with made.open("wb") as file:
            totals = write_delta(file, changes, base_version=first, version=last)
        if totals.weights_hash != walker.weights_hash:
            raise WeightUpdateError("weights_hash", f"the composed delta does not lead to version {last}")
        ref = store.put_file(compact_stem(catalog.records, first, last), made)
    deltas = [b for r in between for b in r.blobs_of(BlobKind.DELTA)]
    return Compacted(
        first=first,
        last=last,
        name=ref.name,
        bytes=ref.size,
        replaces=len(between),
        replaced_bytes=sum(b.size for b in deltas),
        changed=totals.changed,
    )


def _newest_anchor(catalog: Catalog, last: int) -> int:
    found = [v for v, r in catalog.records.items() if v < last and catalog.has(r, BlobKind.ANCHOR)]
    if not found:
        raise ConfigError(f"no anchor below version {last} is in the store: `headrace weights ls` shows them")
    return max(found)
