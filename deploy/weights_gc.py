"""The clean-up of a policy's blobs: what is planned, with what the engines say, and the deletion."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..schemas.config import Config
from ..streams.blobs import BlobStore
from ..streams.retention import Plan, plan_cleanup
from .weights_log import Catalog, folders, read_engines

UNFINISHED_SECONDS = 86400.0
"""No upload takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and the compacted deltas whose first version goes or is gone."""

    cleanup: Plan
    compacts: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes."""
    unfinished: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes of what writers left that died in the middle."""

    def names(self, orphans: str = "keep") -> dict[str, int]:
        """Name -> bytes of all that is to go, in the order of versions."""
        found = {blob.uri: blob.size for _, blob in self.cleanup.delete} | {
            **self.compacts,
            **self.unfinished,
        }
        return found | (dict(self.cleanup.unknown) if orphans == "delete" else {})

    def as_json(self, names: Mapping[str, int], *, deleted: bool) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "deleted": deleted,
            "floor": self.cleanup.floor,
            "blobs": len(names),
            "bytes": sum(names.values()),
            "names": list(names),
            "holds": [dataclasses.asdict(h) for h in self.cleanup.holds],
            "orphans": dict(self.cleanup.unknown),
        }


def plan(
    config: Config,
    store: BlobStore,
    catalog: Catalog,
    *,
    keep_anchors: int = 2,
    keep_versions: Iterable[int] = (),
    engine_age_s: float = 3600.0,
) -> Planned:
    """What may go now, by what the engines said last. Raises BrokerError, ConfigError."""
    cleanup = plan_cleanup(
        catalog.records.values(),
        catalog.present,
        read_engines(config),
        keep_anchors=keep_anchors,
        keep_versions=keep_versions,
        engine_age_s=engine_age_s,
    )
    floor = cleanup.floor if cleanup.floor is not None else -1
    compacts = {
        j.blobs[0].uri: j.blobs[0].size
        for j in catalog.jumps
        if j.base_version is not None and j.base_version < floor and j.version not in set(keep_versions)
    }
    before_s = time.time() - UNFINISHED_SECONDS
    unfinished = {
        n: size
        for f in folders(catalog.records.values())
        for n, size in store.unfinished(f, before_s=before_s).items()
    }
    return Planned(cleanup=cleanup, compacts=compacts, unfinished=unfinished)


def clean_up(store: BlobStore, names: Iterable[str], done: Callable[[str], object] = lambda _: None) -> None:
    """Delete; one that is gone already is fine, and after an error the rest is still there. Raises BlobError."""
    for name in names:
        store.delete(name)
        done(name)


def plan_lines(plan: Plan, names: Mapping[str, int], *, deleted: bool) -> list[str]:
    """For people: what is kept and why, what goes or went."""
    lines = ["fewer whole anchors are in the store than are to be kept: no version can go"]
    if plan.floor is not None:
        lines = [f"kept: every version from anchor {plan.floor} on"]
    lines += [f"held: {h.blobs} older blobs, {h.bytes:,} bytes, because {h.why}" for h in plan.holds]
    if plan.unknown and not deleted:
        lines.append(orphans_text(plan))
    freed = f"{len(names)} blobs, {sum(names.values()):,} bytes"
    lines.append(f"deleted: {freed}" if deleted else f"would be deleted: {freed}; --yes deletes them")
    return lines


def orphans_text(plan: Plan) -> str:
    """What the unknown blobs may be, and what to do."""
    some = ", ".join(sorted(plan.unknown)[:3])
    return (
        f"{len(plan.unknown)} blobs are named by no record of this log ({some}): left by a trainer that died, or another "
        "run's in the same store. If another run uses this store, do not clean up here: give each run its own "
        "store.uri. If none does: --orphans=delete, or --orphans=keep"
    )
