"""Child processes that cannot outlive their parent: own process group, death signal, graceful stop with a limit.

A child is spawned from a thread that lives as long as the parent: Linux sends the death signal when the
spawning thread ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..schemas.errors import ConfigError
from .interrupts import shielded


class PortTakenError(ConfigError):
    """Something else listens there."""


_PR_SET_PDEATHSIG = 1
_scopes: list[list[subprocess.Popen[bytes]]] = []
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    death_signal: signal.Signals | None = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start `argv` in a process group of its own, output appended to `log`, `death_signal` when the parent dies.

    Without a `death_signal` it outlives the parent, in a session of its own.
    """
    die = None if _LIBC is None or death_signal is None else _die_with(os.getpid(), death_signal)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out, shielded():
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            process_group=None if death_signal is None else 0,
            start_new_session=death_signal is None,
            preexec_fn=die,
        )
        for scope in _scopes[-1:]:
            scope.append(process)
    return process


@contextlib.contextmanager
def children_stopped(*, grace_s: float) -> Iterator[None]:
    """At the end, stop what was spawned inside and still runs: an interruption may have come before anyone held it."""
    scope: list[subprocess.Popen[bytes]] = []
    _scopes.append(scope)
    try:
        yield
    finally:
        _scopes.remove(scope)
        for process in scope:
            if process.poll() is None:
                stop(process, grace_s=grace_s)


def _die_with(parent: int, sig: signal.Signals) -> Callable[[], None]:
    def arrange() -> None:
        assert _LIBC is not None
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig))
        # The parent may have died between fork and prctl; then no signal would ever come.
        if os.getppid() != parent:
            os._exit(1)

    return arrange


def signal_group(process: subprocess.Popen[bytes], sig: signal.Signals) -> None:
    """Send `sig` to the child's whole process group; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, sig)


def stop(process: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """SIGTERM to the child, and SIGKILL to its group after `grace_s`; returns its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    # Also when the child ended by itself: what it started must not stay.
    signal_group(process, signal.SIGKILL)
    return process.wait()


def tail(path: Path, *, lines: int = 15, max_bytes: int = 16384) -> str:
    """The last lines of a log file, indented; a note where there are none."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - max_bytes))
            text = f.read().decode("utf-8", "replace")
    except OSError as e:
        return f"    ({path}: {e.strerror})"
    found = text.splitlines()[-lines:]
    return "\n".join(f"    {line}" for line in found) if found else "    (nothing was printed)"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def require_free_port(port: int, *, host: str = "127.0.0.1", what: str, how: str) -> None:
    """PortTakenError naming the port and `how` to choose another, unless `port` can be listened on."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise PortTakenError(
                f"{what}: port {port} on {host} cannot be used ({e.strerror}); {how}"
            ) from None


def wait_until(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    *,
    timeout_s: float,
    interval_s: float = 0.02,
) -> str | None:
    """None once `ready()`; otherwise why not: the process ended, or `timeout_s` passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        status = process.poll()
        if status is not None:
            return f"it ended with status {status}"
        if ready():
            return None
        if time.monotonic() > deadline:
            return f"it was not ready after {timeout_s:.0f} s"
        time.sleep(interval_s)


def accepts(host: str, port: int) -> bool:
    """True if something accepts a TCP connection there."""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False
