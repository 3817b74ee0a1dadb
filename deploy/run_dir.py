"""The folder of one run on this machine, and the lock that keeps a second run out of it.

config.json   the whole configuration, as its processes got it      logs/      one file a process
broker/       the local broker's data                               blobs/     the local object store
model/        version 0 of the demo                                 restarts.json  by role and cause
summary.json, plot.png    at the end
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ..schemas.config import Config
from ..schemas.errors import ConfigError
from .restart_file import RESTARTS_FILE
from .settings import RUN_FILE

LOCK = "lock"
OURS = (
    RUN_FILE,
    "logs",
    "broker",
    "blobs",
    "checkpoints",
    "faust",
    "model",
    RESTARTS_FILE,
    "summary.json",
    "plot.png",
    LOCK,
)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold `run_dir`; ConfigError while another process does, or where there can be no such folder.

    The lock goes with the process, however it ends.
    """
    import fcntl

    with _open_lock(run_dir) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ConfigError(
                f"{run_dir} is in use by another run (process {lock.read().strip() or 'unknown'}); "
                "stop it, or choose another --run-dir"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _open_lock(run_dir: Path) -> TextIO:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return (run_dir / LOCK).open("a+")
    except OSError as e:
        raise ConfigError(
            f"the run's folder {run_dir} cannot be made and written to ({e.strerror}); "
            "choose another with --run-dir (or run.dir)"
        ) from None


def check_same_run(run_dir: Path, config: Config) -> None:
    """ConfigError where `run_dir` holds the run of another namespace, policy or model than `config` is for.

    Other settings may differ: a run may go on with them.
    """
    path = run_dir / RUN_FILE
    if not path.exists():
        return
    other = "use another folder with --run-dir (or run.dir)"
    try:
        before = Config.model_validate(json.loads(path.read_text()))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path}, of an earlier run, cannot be read; {other}, or remove it: {e}") from None
    for key, old, new in (
        ("run.namespace", before.run.namespace, config.run.namespace),
        ("policy.id", before.policy.id, config.policy.id),
        ("policy.model", _resolved(before.policy.model), _resolved(config.policy.model)),
    ):
        if old != new:
            raise ConfigError(f"{run_dir} holds another run: {key} is {old} there and {new} now; {other}")


def _resolved(path: Path | None) -> Path | None:
    return path.resolve() if path is not None else None


def clear(run_dir: Path, *, marker: str) -> None:
    """Remove what an earlier run of the same kind left in `run_dir`; ConfigError where it holds anything else.

    `marker`: a file that only such a run writes.
    """
    found = {p.name for p in run_dir.iterdir()} - {LOCK}
    if not found:
        return
    foreign = sorted(found - {*OURS, marker})
    if marker not in found or foreign:
        what = f"holds {foreign[0]}" if foreign else "holds another run"
        raise ConfigError(f"{run_dir} {what}: choose an empty or a new folder with --run-dir")
    for name in found:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
