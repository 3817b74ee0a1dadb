"""Processes that are not our children: which one has an id now, and an end for its group; bytes in a folder."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil


def process_start(pid: int) -> str | None:
    """When the process with this id began, as a text that no other process with that id has; None if it is gone.

    A zombie is gone.
    """
    if sys.platform == "linux":
        try:
            # Behind the name, which may hold anything: state is the first field, the start time the twentieth.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def kill_group(pid: int) -> None:
    """SIGKILL to the group that this process leads; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def bytes_on_disk(folder: Path) -> int:
    """What the files below take: Kafka's index files are longer than what they hold."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # Segments come and go meanwhile.
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total
