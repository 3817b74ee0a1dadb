"""From what the user typed to a Config: which file, `--set key=value` over it, and where a local run is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schemas.errors import BrokerUnreachableError, ConfigError

if TYPE_CHECKING:
    from ..schemas.config import Config

DEFAULT_FILE = Path("headrace.toml")
RUN_FILE = "config.json"
"""In a run's folder: the whole configuration as its processes got it, the broker's address included."""
RUNS = Path("runs")
FLAGS = {
    "run.dir": "--run-dir",
    "run.seed": "--seed",
    "trainer.steps": "--steps",
    "kafka.bootstrap": "--bootstrap",
    "kafka.broker": "--kind",
    "kafka.kafka_home": "--kafka-home",
}
"""Keys that commands have an option of their own for."""


def parse_sets(sets: Sequence[str]) -> dict[str, Any]:
    """`key=value` pairs; a value that is JSON is taken as such, any other is text. ConfigError without a '='."""
    found: dict[str, Any] = {}
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item!r}: write it as key=value, such as --set trainer.lr=1e-5")
        try:
            found[key.strip()] = json.loads(text)
        except ValueError:
            found[key.strip()] = text
    return found


def load(
    path: Path | None, sets: Sequence[str] = (), *, overrides: Mapping[str, Any] | None = None
) -> Config:
    """The configuration in `path` (or ./headrace.toml where there is one), environment, then flags over it.

    `overrides` come from options of their own and win over `sets`; None is an option that was not given.
    """
    from ..schemas.config_file import load_config

    if path is None and DEFAULT_FILE.exists():
        path = DEFAULT_FILE
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    flags = {key: FLAGS[key] for key in given if key in FLAGS}
    return load_config(path, env=os.environ, overrides={**parse_sets(sets), **given}, flags=flags)


def load_running(path: Path | None, run_dir: Path | None, sets: Sequence[str] = ()) -> Config:
    """The configuration of a run to look at: by its folder, by file, or the newest one under ./runs.

    A file without kafka.bootstrap stands for the local run in its run.dir, whose broker was started for it.
    """
    if run_dir is not None:
        return load(_run_file(run_dir), sets)
    if path is None and not DEFAULT_FILE.exists() and not any(s.startswith("kafka.bootstrap=") for s in sets):
        return load(_newest_run(), sets)
    config = load(path, sets)
    if config.kafka.bootstrap is None:
        return load(_run_file(config.run.dir), sets)
    return config


def _run_file(run_dir: Path) -> Path:
    path = run_dir / RUN_FILE
    if not path.exists():
        raise ConfigError(
            f"{run_dir} holds no run (no {RUN_FILE}): give a run's folder with --run-dir, or kafka.bootstrap in -c"
        )
    return path


def _newest_run() -> Path:
    found = sorted(RUNS.glob(f"*/{RUN_FILE}"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise ConfigError(
            "no run to look at: give a configuration with -c, a run's folder with --run-dir, or start one with "
            "`headrace demo` or `headrace up`"
        )
    return found[-1]


def require_reachable(config: Config) -> None:
    """BrokerUnreachableError at once when no bootstrap address accepts a connection (clients retry for 10 s)."""
    from .processes import accepts

    addresses = (config.kafka.bootstrap or "").split(",")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if port.isdigit() and accepts(host, int(port)):
            return
    raise BrokerUnreachableError(
        f"no Kafka broker answers at {config.kafka.bootstrap}: is the run, or the broker, still going? "
        "Look at another run with --run-dir, or at another broker with --set kafka.bootstrap=host:port. The log of a "
        "run that has ended is read with its broker: headrace broker run --data-dir RUN/broker/KIND --port PORT"
        if config.kafka.bootstrap
        else "kafka.bootstrap is not set: give host:port with --set kafka.bootstrap=..."
    )
