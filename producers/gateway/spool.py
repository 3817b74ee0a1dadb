"""Finished rollouts on disk until Kafka has them: what `finish` has answered with 200 survives the process.

One file a rollout, written beside, synced and renamed: it is there whole or not at all. A file goes when each of
its records is acknowledged. After a restart the records that are left are looked for in the topic first, from
where it ended when they were written, so that each is in the topic once.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...schemas.codec import version_headers
from ...schemas.errors import ConfigError, InvalidMessageError
from ...schemas.trajectory import TRAJECTORY, Trajectory

logger = logging.getLogger(__name__)

SUFFIX = ".rollout"
BROKEN = ".broken"


@dataclass(slots=True, kw_only=True)
class Kept:
    """A rollout in the spool."""

    path: Path
    size: int
    written_ms: int
    """Unix milliseconds of this machine's clock."""
    waiting: set[str]
    """Ids of its trajectories that are not acknowledged."""


class Spool:
    """A folder that belongs to one gateway at a time."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        """Raises ConfigError where the folder cannot be used."""
        self._folder, self._most = folder, most_bytes
        self._kept: dict[str, Kept] = {}
        self.size = 0
        """Bytes of all files."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for torn in folder.glob("*.tmp"):
                torn.unlink()
        except OSError as e:
            raise ConfigError(f"gateway.spool_dir {folder} cannot be used: {e}") from None

    def __len__(self) -> int:
        return len(self._kept)

    def full(self) -> str | None:
        """Why no new rollout may begin, or None."""
        if self.size < self._most:
            return None
        return (
            f"{len(self._kept)} finished rollouts of {self.size >> 20} MiB wait for Kafka in {self._folder}, "
            f"gateway.spool_mb is {self._most >> 20}"
        )

    def waiting(self, rollout_id: str) -> int:
        """How many trajectories of a rollout wait here."""
        kept = self._kept.get(rollout_id)
        return 0 if kept is None else len(kept.waiting)

    def write(self, trajectories: Sequence[Trajectory], *, now_ms: int) -> Kept:
        """Returns when they are safe; `add` then counts them. Blocks on the disk. OSError; InvalidMessageError."""
        rollout_id = trajectories[0].rollout_id
        values = [TRAJECTORY.encode(t) for t in trajectories]
        body = b"".join(values)
        ids = [t.trajectory_id for t in trajectories]
        head = {"rollout_id": rollout_id, "written_ms": now_ms, "sizes": [len(v) for v in values]}
        head["hash"] = xxhash.xxh3_64_hexdigest(body)
        path = self._folder / f"{rollout_id}{SUFFIX}"
        torn = path.with_suffix(".tmp")
        with open(torn, "wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(torn, path)
        _sync_folder(self._folder)
        return Kept(path=path, size=path.stat().st_size, written_ms=now_ms, waiting=set(ids))

    def add(self, rollout_id: str, kept: Kept) -> None:
        """Count what was written."""
        self._kept[rollout_id] = kept
        self.size += kept.size

    def acknowledged(self, trajectory: Trajectory) -> None:
        """Kafka has it."""
        kept = self._kept.get(trajectory.rollout_id)
        if kept is None:
            return
        kept.waiting.discard(trajectory.trajectory_id)
        if not kept.waiting:
            del self._kept[trajectory.rollout_id]
            self.size -= kept.size
            kept.path.unlink(missing_ok=True)

    def recover(self) -> list[Trajectory]:
        """What an earlier process has left; counted from now on. A file that is damaged is put aside, with an error."""
        found: list[Trajectory] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                written_ms, trajectories = _read(path)
            except (OSError, ValueError, KeyError, TypeError) as e:
                logger.error("a spooled rollout cannot be read, put aside path=%s: %s", path, e)
                path.rename(path.with_suffix(BROKEN))
                continue
            ids = {t.trajectory_id for t in trajectories}
            kept = Kept(path=path, size=path.stat().st_size, written_ms=written_ms, waiting=ids)
            self.add(trajectories[0].rollout_id, kept)
            found += trajectories
        return found

    def oldest_ms(self) -> int | None:
        """When the oldest rollout here was written; None where there is none."""
        return min((k.written_ms for k in self._kept.values()), default=None)


def _read(path: Path) -> tuple[int, list[Trajectory]]:
    head_line, _, body = path.read_bytes().partition(b"\n")
    head = json.loads(head_line)
    if xxhash.xxh3_64_hexdigest(body) != head["hash"] or sum(head["sizes"]) != len(body):
        raise ValueError("its hash differs")
    found, at = [], 0
    for size in head["sizes"]:
        # Which policy versions a record holds makes no difference to how it is read.
        headers = version_headers(TRAJECTORY.tag, "", -1, -1)
        try:
            found.append(TRAJECTORY.decode(body[at : at + size], headers))
        except InvalidMessageError as e:
            raise ValueError(str(e)) from None
        at += size
    if not found:
        raise ValueError("it holds no record")
    return int(head["written_ms"]), found


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
