"""A model directory on disk that holds an engine's weights: written whole at an anchor, patched in place by deltas.

A server that loads weights from disk reads it. Everything but the weights (config, tokenizer) is copied from the
model's own directory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.dtypes import Dtype
from ...schemas.errors import EngineError, WeightUpdateError
from ...schemas.update import TensorPatch, WeightUpdate, apply_update, check_same_tensors, unknown_tensor
from ...schemas.weight_hash import set_hash

FILE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class Checkpoint:
    """The directory `path`; nothing in it before the first anchor. Used by one thread at a time."""

    def __init__(self, path: Path, model: Path | None = None) -> None:
        """`model`: whose config and tokenizer are copied, where there is one. Raises EngineError."""
        self.path = path
        self._tensors: dict[str, np.ndarray] = {}
        self._dtypes: dict[str, Dtype] = {}
        self._staged: tuple[WeightUpdate, dict[str, np.ndarray]] | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            # In a folder that everybody may write to, somebody else may have made it first.
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it belongs to somebody else")
            (path / FILE).unlink(missing_ok=True)
            for source in sorted(model.iterdir()) if model is not None else ():
                if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
                    shutil.copyfile(source, path / source.name)
        except OSError as e:
            raise _cannot(path, e) from None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape; empty before the first anchor."""
        return {name: bits.shape for name, bits in self._tensors.items()}

    def bits(self, name: str) -> np.ndarray:
        """One tensor's bit patterns in its shape, as they are in the file."""
        return self._tensors[name]

    def dtype(self, name: str) -> Dtype:
        """Of one tensor."""
        return self._dtypes[name]

    def check(self, update: WeightUpdate) -> None:
        """WeightUpdateError unless every patch fits; writes nothing."""
        if not self._tensors:
            if update.base_version is not None:
                raise WeightUpdateError("base_version", f"{update.base_version}, and there is no anchor yet")
            return
        if update.base_version is None:
            check_same_tensors(self.shapes, {p.name: p.shape for p in update.patches})
        for patch in update.patches:
            if patch.name not in self._tensors:
                raise WeightUpdateError("unknown_tensor", unknown_tensor(patch.name, self._tensors))
            shape = self._tensors[patch.name].shape
            if patch.shape != shape:
                raise WeightUpdateError("shape", f"{patch.name} is {list(shape)}, given {list(patch.shape)}")
            if patch.dtype is not self._dtypes[patch.name]:
                raise WeightUpdateError(
                    "dtype", f"{patch.name} is {self._dtypes[patch.name]}, given {patch.dtype}"
                )

    def stage(self, update: WeightUpdate) -> None:
        """Write an anchor's file beside the live one, which stays as it is. Raises EngineError."""
        self._staged = None
        if update.base_version is None:
            # A new file: a server may still be reading the old one, after a call that was cut.
            try:
                fresh = _create(self.path / f"{FILE}.new", update)
            except OSError as e:
                raise _cannot(self.path, e) from None
            apply_update(fresh, update)
            self._staged = update, fresh

    def write(self, update: WeightUpdate) -> None:
        """Make the file hold `update`, which `check` has passed. Raises EngineError; the file is then of no use."""
        if update.base_version is not None:
            apply_update(self._tensors, update)
            return
        if self._staged is None or self._staged[0] is not update:
            self.stage(update)
        assert self._staged is not None
        try:
            (self.path / f"{FILE}.new").replace(self.path / FILE)
        except OSError as e:
            raise _cannot(self.path, e) from None
        self._tensors, self._staged = self._staged[1], None
        self._dtypes = {p.name: p.dtype for p in update.patches}

    def differs(self, update: WeightUpdate) -> str | None:
        """The first tensor that is not as `update` says, where it says something."""
        for patch in update.patches:
            flat = self._tensors[patch.name].reshape(-1)
            if not np.array_equal(flat if patch.indices is None else flat[patch.indices], patch.bits):
                return patch.name
        return None

    def hash(self) -> int:
        """Rolling hash (uint64) of everything in the file."""
        return set_hash(self._tensors, dtypes=self._dtypes)

    def remove(self) -> None:
        """Delete the directory."""
        self._tensors, self._dtypes, self._staged = {}, {}, None
        shutil.rmtree(self.path, ignore_errors=True)


def _create(path: Path, update: WeightUpdate) -> dict[str, np.ndarray]:
    """A safetensors file with room for all of `update`; its tensors, still zero, as views of it. Raises OSError."""
    # Wide elements first: then every tensor is aligned.
    patches = sorted(update.patches, key=lambda p: (-p.dtype.bits.itemsize, p.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for patch in patches:
        end = at + patch.bits.nbytes
        shape = list(patch.shape)
        header[patch.name] = {"dtype": patch.dtype.safetensors, "shape": shape, "data_offsets": [at, end]}
        at = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        f.flush()
        # All the room now: a memory map in a full file system kills the process instead of raising.
        os.posix_fallocate(f.fileno(), 0, 8 + len(head) + at)
    mapped = np.memmap(path, dtype=np.uint8, mode="r+", offset=8 + len(head))
    return {p.name: _view(mapped, p, *header[p.name]["data_offsets"]) for p in patches}


def _view(mapped: np.ndarray, patch: TensorPatch, start: int, end: int) -> np.ndarray:
    return np.asarray(mapped[start:end]).view(patch.dtype.bits).reshape(patch.shape)


def _cannot(path: Path, error: OSError) -> EngineError:
    return EngineError(
        f"the weights for the server cannot be written to {path} ({error.strerror});"
        " set engine.sglang.checkpoint_dir to a folder with room that the server sees too"
    )
