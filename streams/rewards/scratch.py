"""Folders that confined processes write to, below one root of this process; what a killed one left is swept.

The root's lock is held as long as its process lives, so that no other sweeps it, in whatever container it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "headrace-rewards-"
LOCK = "lock"


class Scratch:
    """Makes folders; each is the owner's to remove. The root goes with `close`, or with a later `Scratch`."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent`: the folder for temporary files, unless given. Sweeps it first."""
        self._parent = parent if parent is not None else Path(tempfile.gettempdir())
        _sweep(self._parent)
        self._root: Path | None = None
        self._lock = -1

    def folder(self) -> str:
        """A new folder, empty, for this user alone."""
        if self._root is not None:
            # What tidies up /tmp by age takes the root of a worker that has run for long.
            with contextlib.suppress(FileNotFoundError):
                return tempfile.mkdtemp(dir=self._root)
            self.close()
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))
        self._lock = _open(root)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._root = root
        return tempfile.mkdtemp(dir=root)

    def remove(self, folder: str) -> None:
        """Remove one folder that `folder` made."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove the root with all in it."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self._root = None


def _open(root: Path) -> int:
    return os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _sweep(parent: Path) -> None:
    """Remove the roots whose process has ended."""
    for root in parent.glob(f"{PREFIX}*"):
        # Without a lock file it may be just being made; what belongs to another user cannot be opened.
        with contextlib.suppress(OSError):
            lock = os.open(root / LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
            finally:
                os.close(lock)
