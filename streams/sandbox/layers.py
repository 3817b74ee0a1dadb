"""`apply` confines the calling process by every layer that this machine has, and says which it has not.

`python -m headrace.streams.sandbox.layers FOLDER` does so to itself and prints what is missing: the probe.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from . import landlock, seccomp

_PDEATHSIG, _NO_NEW_PRIVS = 1, 38
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAP_VERSION_3 = 0x20080522


@dataclass(frozen=True, slots=True)
class Policy:
    """What a process may do."""

    folder: str
    """The one place it may write to."""
    memory_mb: int
    """Of address space."""
    cpu_seconds: int | None = None
    file_mb: int = 64
    """Size of one file."""
    files: int = 256
    """Open at once."""
    network: bool = False
    write: bool = False
    processes: bool = False


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def apply(policy: Policy) -> list[str]:
    """Confine this process. Returns a line for each layer that is missing; the limits always hold."""
    die_with_parent()
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = {
        resource.RLIMIT_AS: policy.memory_mb << 20,
        resource.RLIMIT_NOFILE: policy.files,
        resource.RLIMIT_CORE: 0,
    }
    if policy.cpu_seconds is not None:
        limits[resource.RLIMIT_CPU] = policy.cpu_seconds
    if not policy.write:
        limits[resource.RLIMIT_FSIZE] = policy.file_mb << 20
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (limit, limit))
    missing = []
    try:
        _drop_capabilities()
    except OSError as e:
        missing.append(f"capabilities: {e}")
    if not policy.write:
        try:
            landlock.restrict(policy.folder)
        except OSError as e:
            missing.append(f"landlock (writes outside the folder): {e}")
    try:
        seccomp.install(network=policy.network, processes=policy.processes, modes=policy.write)
    except OSError as e:
        missing.append(f"seccomp (network, processes): {e}")
    return missing


def probe() -> list[str]:
    """What is missing on this machine, found by trying it in a process. Empty: all layers work."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", __name__, folder], capture_output=True, text=True, timeout=60, check=False
        )
    if done.returncode != 0:
        return [f"a confined process could not start: {done.stderr.strip()[-200:]}"]
    missing: list[str] = json.loads(done.stdout)
    return missing


def _drop_capabilities() -> None:
    """Root keeps its files and nothing else, so that it cannot raise a limit again."""
    number = _CAPSET.get(os.uname().machine)
    if number is None:
        raise OSError(f"unknown machine {os.uname().machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    head = struct.pack("Ii", _CAP_VERSION_3, 0)
    if libc.syscall(number, ctypes.c_char_p(head), ctypes.c_char_p(bytes(24))) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    print(json.dumps(apply(Policy(sys.argv[1], memory_mb=1024))))
