"""Checkpoints: a folder per version with safetensors and JSON, complete or not there at all.

    <root>/v000020/state.safetensors            fp32 master, Adam moments and step counts, torch's generator
    <root>/v000020/state-000-of-002.safetensors  the same, the rows of one rank of two
    <root>/v000020/meta.json                    version, weights hash, offsets, hash of the settings, ranks
    <root>/v000020.other                        of another log: never used

Written to a temporary folder, flushed to disk, then renamed. Nothing in them is code. The ranks of a trainer share
the root's file system; any number of them can load what any other number wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from ...schemas.errors import TeamError
from .orders import Order, tell
from .shards import rows_of
from .team import Alone, Team, together

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^v(\d{6,})$")
_META, _GENERATOR = "meta.json", "generator"
_WHOLE = "step/"
"""Tensors whose names begin with it are the same on every rank; the others are cut by rows."""
FORMAT = "headrace-checkpoint/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What meta.json says."""

    version: int
    weights_hash: int
    """Rolling hash (uint64) of the bf16 weights."""
    consumed: tuple[tuple[int, int], ...]
    """(partition, next offset) of samples."""
    config_hash: str
    ranks: int = 1
    """Into how many files its tensors are cut."""


class Checkpoints:
    """The checkpoints of one policy under one folder. `save` and `load` are called on all ranks alike."""

    def __init__(self, root: Path, *, keep: int, team: Team | None = None) -> None:
        self.root, self._keep = root, keep
        self._team: Team = Alone() if team is None else team

    def save(self, info: CheckpointInfo, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write one, then remove the oldest beyond `keep`, never the one just written. Raises OSError.

        `tensors`: of this rank. One that exists under this version is replaced. A death at any moment leaves the old
        one or the new one.
        """
        info = dataclasses.replace(info, ranks=self._team.size)
        tell(self._team, Order.SAVE, lambda: json.dumps(_to_json(info)).encode())
        part = self.root / f"v{info.version:06d}.part"
        state = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        state[_GENERATOR] = torch.get_rng_state()
        try:
            for work in (
                lambda: self._begin(part),
                lambda: _write(state, part / _state(self._team.rank, self._team.size)),
                lambda: self._finish(part, info),
            ):
                together(self._team, work)
        except TeamError as e:
            raise OSError(str(e)) from e
        return part.with_suffix("")

    def _begin(self, part: Path) -> bytes:
        if self._team.rank == 0:
            self.root.mkdir(parents=True, exist_ok=True)
            self._tidy()
            part.mkdir()
        return b""

    def _finish(self, part: Path, info: CheckpointInfo) -> bytes:
        if self._team.rank == 0:
            (part / _META).write_text(json.dumps(_to_json(info), indent=1))
            for path in (part / _META, part):
                _flush(path)
            final = part.with_suffix("")
            old = final.with_suffix(".old")
            if final.exists():
                final.rename(old)
            part.rename(final)
            _flush(self.root)
            shutil.rmtree(old, ignore_errors=True)
            others = [version for version in self._versions() if version != info.version]
            for version in others[: max(0, len(others) + 1 - self._keep)]:
                shutil.rmtree(self._folder(version))
        return b""

    def set_aside(self, infos: Sequence[CheckpointInfo]) -> None:
        """Rename these to `<name>.other`: checkpoints of another log would push out this one's."""
        for info in infos:
            folder = self._folder(info.version)
            other = folder.with_suffix(".other")
            shutil.rmtree(other, ignore_errors=True)
            folder.rename(other)
            logger.warning("a checkpoint of another log is set aside: %s", other)

    def _tidy(self) -> None:
        """Finish what a death interrupted: an old checkpoint without its successor is the checkpoint."""
        for leftover in self.root.glob("*.part"):
            shutil.rmtree(leftover)
        for old in self.root.glob("*.old"):
            if old.with_suffix("").exists():
                shutil.rmtree(old)
            else:
                old.rename(old.with_suffix(""))

    def infos(self) -> list[CheckpointInfo]:
        """Every readable checkpoint, the newest first; an unreadable one is logged and left out."""
        if self.root.is_dir():
            self._tidy()
        found = []
        for version in reversed(self._versions()):
            path = self._folder(version) / _META
            try:
                found.append(_from_json(json.loads(path.read_text())))
            except (OSError, ValueError, KeyError, TypeError) as e:
                logger.warning("checkpoint %s cannot be read: %s", path.parent, e)
        return found

    def load(self, info: CheckpointInfo) -> dict[str, torch.Tensor]:
        """This rank's tensors of one, and torch's generator is set as it was. ValueError when a file is broken."""
        tell(self._team, Order.LOAD, lambda: json.dumps(_to_json(info)).encode())
        tensors: dict[str, torch.Tensor] = {}

        def read() -> bytes:
            try:
                tensors.update(_read(self._folder(info.version), info.ranks, self._team))
            except (ValueError, KeyError, safetensors.SafetensorError) as e:
                raise OSError(f"{type(e).__name__}: {e}") from e
            return b""

        try:
            together(self._team, read)
        except (OSError, TeamError) as e:
            raise ValueError(f"checkpoint {self._folder(info.version)} cannot be read: {e}") from e
        torch.set_rng_state(tensors.pop(_GENERATOR))
        return tensors

    def _versions(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (_NAME.match(p.name) for p in self.root.iterdir())
        return sorted(int(m[1]) for m in matches if m)

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"


def info_of(told: bytes) -> CheckpointInfo:
    """What rank 0 said with an order to save or to load."""
    return _from_json(json.loads(told))


def _state(rank: int, ranks: int) -> str:
    return "state.safetensors" if ranks == 1 else f"state-{rank:03d}-of-{ranks:03d}.safetensors"


def _write(state: Mapping[str, torch.Tensor], path: Path) -> bytes:
    try:
        save_file(dict(state), path)
    except safetensors.SafetensorError as e:
        raise OSError(f"{path} cannot be written: {e}") from e
    _flush(path)
    return b""


def _read(folder: Path, ranks: int, team: Team) -> dict[str, torch.Tensor]:
    """The rows of this rank, from the files of however many wrote them."""
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(safetensors.safe_open(folder / _state(rank, ranks), "pt"))
            for rank in range(ranks)
        ]
        own = files[team.rank % ranks]
        found = {}
        for name in files[0].keys():  # noqa: SIM118
            if name == _GENERATOR or name.startswith(_WHOLE):
                found[name] = own.get_tensor(name)
                continue
            slices = [file.get_slice(name) for file in files]
            begins = list(itertools.accumulate((s.get_shape()[0] for s in slices), initial=0))
            begin, end = rows_of(begins[-1], team.rank, team.size)
            parts = [
                s[max(begin, at) - at : min(end, after) - at]
                for s, at, after in zip(slices, begins, begins[1:], strict=False)
                if max(begin, at) < min(end, after)
            ]
            found[name] = torch.cat(parts) if parts else own.get_tensor(name)[:0]
    return found


def _to_json(info: CheckpointInfo) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": info.version,
        "weights_hash": info.weights_hash,
        "consumed": [list(c) for c in info.consumed],
        "config_hash": info.config_hash,
        "ranks": info.ranks,
    }


def _from_json(value: Mapping[str, object]) -> CheckpointInfo:
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
    return CheckpointInfo(
        version=int(value["version"]),  # type: ignore[call-overload]
        weights_hash=int(value["weights_hash"]),  # type: ignore[call-overload]
        consumed=tuple((int(p), int(o)) for p, o in value["consumed"]),  # type: ignore[attr-defined]
        config_hash=str(value["config_hash"]),
        ranks=int(value.get("ranks", 1)),  # type: ignore[call-overload]
    )


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
