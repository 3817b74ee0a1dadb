"""Compacted deltas: one blob that leads from a version to a much later one, beside those that the records name.

`<folder of the blobs>/compact/v<from>-v<to>-<SHA-256>`. The log does not name them: only the trainer writes to it. A
reader that finds one knows its bytes' hash by its name and its result's by the record of the later version, so it
is trusted no more than any other blob, and is never needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ..schemas.weights import BlobKind, WeightBlob, WeightRecord
from .blobs import BlobStore

_NAME = re.compile(r"v(\d+)-v(\d+)-([0-9a-f]{64})")


def compact_folder(records: Mapping[int, WeightRecord]) -> str:
    """Beside the blobs of the newest version."""
    newest = records[max(records)]
    return f"{newest.blobs[0].uri.rpartition('/')[0] or 'weights'}/compact"


def compact_stem(records: Mapping[int, WeightRecord], first: int, last: int) -> str:
    """The name, less the hash, of the delta from version `first` to `last`."""
    return f"{compact_folder(records)}/v{first:06d}-v{last:06d}"


def find_jumps(store: BlobStore, records: Mapping[int, WeightRecord]) -> tuple[WeightRecord, ...]:
    """The records of later versions, each with a base further down and the compacted delta as its only blob.

    Left out are those whose versions are not among `records`. Raises BlobError.
    """
    found: list[WeightRecord] = []
    if not records:
        return ()
    for name, size in sorted(store.sizes(compact_folder(records)).items()):
        match = _NAME.fullmatch(name.rpartition("/")[2])
        if match is None:
            continue
        base, target = records.get(int(match[1])), records.get(int(match[2]))
        if base is None or target is None or base.version >= target.version or size == 0:
            continue
        blob = WeightBlob(kind=BlobKind.DELTA, uri=name, size=size, sha256=match[3])
        jump = replace(target, base_version=base.version, base_hash=base.weights_hash, blobs=(blob,))
        found.append(jump)
    return tuple(found)
