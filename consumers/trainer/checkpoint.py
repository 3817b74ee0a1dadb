"""Checkpoints: a folder per version with safetensors and JSON, complete or not there at all.

    <root>/v000020/state.safetensors    fp32 master, Adam moments and step counts, torch's generator
    <root>/v000020/meta.json            version, weights hash, offsets, hash of the settings
    <root>/v000020.other                of another log: never used

Written to a temporary folder, flushed to disk, then renamed. Nothing in them is code.
"""

from __future__ import annotations

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
from safetensors.torch import load_file, save_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"^v(\d{6,})$")
_STATE, _META, _GENERATOR = "state.safetensors", "meta.json", "generator"
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


class Checkpoints:
    """The checkpoints of one policy under one folder."""

    def __init__(self, root: Path, *, keep: int) -> None:
        self.root, self._keep = root, keep

    def save(self, info: CheckpointInfo, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write one, then remove the oldest beyond `keep`, never the one just written. Raises OSError.

        One that exists under this version is replaced. A death at any moment leaves the old one or the new one.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._tidy()
        part = self.root / f"v{info.version:06d}.part"
        part.mkdir()
        state = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        state[_GENERATOR] = torch.get_rng_state()
        try:
            save_file(state, part / _STATE)
        except safetensors.SafetensorError as e:
            raise OSError(f"{part / _STATE} cannot be written: {e}") from e
        (part / _META).write_text(json.dumps(_to_json(info), indent=1))
        for path in (part / _STATE, part / _META, part):
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
        return final

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
        """The tensors of one, and torch's generator is set as it was. ValueError when the file is broken."""
        path = self._folder(info.version) / _STATE
        try:
            tensors = load_file(path)
        except (OSError, safetensors.SafetensorError) as e:
            raise ValueError(f"checkpoint {path} cannot be read: {e}") from e
        torch.set_rng_state(tensors.pop(_GENERATOR))
        return tensors

    def _versions(self) -> list[int]:
        if not self.root.is_dir():
            return []
        matches = (_NAME.match(p.name) for p in self.root.iterdir())
        return sorted(int(m[1]) for m in matches if m)

    def _folder(self, version: int) -> Path:
        return self.root / f"v{version:06d}"


def _to_json(info: CheckpointInfo) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": info.version,
        "weights_hash": info.weights_hash,
        "consumed": [list(c) for c in info.consumed],
        "config_hash": info.config_hash,
    }


def _from_json(value: Mapping[str, object]) -> CheckpointInfo:
    if value["format"] != FORMAT:
        raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
    return CheckpointInfo(
        version=int(value["version"]),  # type: ignore[call-overload]
        weights_hash=int(value["weights_hash"]),  # type: ignore[call-overload]
        consumed=tuple((int(p), int(o)) for p, o in value["consumed"]),  # type: ignore[attr-defined]
        config_hash=str(value["config_hash"]),
    )


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
