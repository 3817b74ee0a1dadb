"""The versions of a policy as rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..schemas.weights import BlobKind
from .weights_log import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """One version."""

    version: int
    kind: str
    """anchor, delta, or delta+anchor."""
    shards: int
    delta_bytes: int
    anchor_bytes: int
    ratio: float | None
    """Bytes of a full copy for each byte of the delta; None without one."""
    changed: float | None
    """Share of the elements that changed."""
    samples: int
    weights_hash: str
    """16 hex digits."""
    created_ms: int
    missing: tuple[str, ...]
    """Names of its blobs that are not in the store."""
    reachable: bool
    """Whether its weights can still be put together."""


def version_rows(catalog: Catalog) -> list[VersionRow]:
    """In the order of versions."""
    rows, reachable = [], set[int]()
    for r in catalog.records.values():
        kinds = [k.value for k in (BlobKind.DELTA, BlobKind.ANCHOR) if r.blobs_of(k)]
        delta, anchor = (sum(b.size for b in r.blobs_of(k)) for k in (BlobKind.DELTA, BlobKind.ANCHOR))
        jumped = any(j.version == r.version and j.base_version in reachable for j in catalog.jumps)
        stepped = catalog.has(r, BlobKind.DELTA) and r.version - 1 in reachable
        if jumped or stepped or catalog.has(r, BlobKind.ANCHOR):
            reachable.add(r.version)
        rows.append(
            VersionRow(
                version=r.version,
                kind="+".join(kinds),
                shards=max(b.shards for b in r.blobs),
                delta_bytes=delta,
                anchor_bytes=anchor,
                ratio=round(r.full_bytes / delta, 1) if delta and r.full_bytes else None,
                changed=r.changed_elements / r.total_elements if r.total_elements else None,
                samples=r.trained,
                weights_hash=f"{r.weights_hash:016x}",
                created_ms=r.created_ms,
                missing=tuple(catalog.missing(r)),
                reachable=r.version in reachable,
            )
        )
    return rows


def versions_table(rows: Iterable[VersionRow]) -> Any:
    """A rich table."""
    from rich.table import Table

    table = Table(
        "version", "kind", "delta bytes", "of full", "changed", "anchor bytes", "hash", "", box=None
    )
    for column in table.columns[2:6]:
        column.justify = "right"
    table.columns[0].justify = "right"
    for column in (table.columns[6], table.columns[7]):
        column.no_wrap = True
    for r in rows:
        state = "" if not r.missing else f"{len(r.missing)} gone" + ("" if r.reachable else ", out of reach")
        table.add_row(
            str(r.version),
            r.kind,
            f"{r.delta_bytes:,}" if r.delta_bytes else "",
            f"1/{r.ratio:.0f}" if r.ratio is not None else "",
            f"{r.changed:.2%}" if r.changed is not None and r.delta_bytes else "",
            f"{r.anchor_bytes:,}" if r.anchor_bytes else "",
            r.weights_hash,
            state,
        )
    return table
