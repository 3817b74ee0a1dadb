"""Where headrace keeps what outlives runs, and the Apache Kafka releases that were fetched into it.

<data folder>/kafka/<version>/   one unpacked release each; it is there whole and verified, or not at all
<data folder>/broker/            the records of `headrace broker start`
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

VERSION = "4.3.1"
"""Of Apache Kafka: what `headrace broker fetch` fetches, and what headrace is tested with."""
SCALA = "2.13"
VERSION_PATTERN = r"\d+\.\d+\.\d+(?:-rc\d+)?"


def data_dir(env: Mapping[str, str] | None = None) -> Path:
    """$HEADRACE_DATA, else $XDG_DATA_HOME/headrace, else ~/.local/share/headrace."""
    env = os.environ if env is None else env
    if env.get("HEADRACE_DATA"):
        return Path(env["HEADRACE_DATA"]).expanduser().absolute()
    root = env.get("XDG_DATA_HOME")
    return (Path(root) if root else Path.home() / ".local" / "share") / "headrace"


def releases_dir(env: Mapping[str, str] | None = None) -> Path:
    """Where fetched releases lie."""
    return data_dir(env) / "kafka"


def fetched_release(env: Mapping[str, str] | None = None) -> Path | None:
    """The newest release that was fetched, or None."""
    folder = releases_dir(env)
    if not folder.is_dir():
        return None
    found = [p for p in folder.iterdir() if re.fullmatch(VERSION_PATTERN, p.name) and (p / "libs").is_dir()]
    return max(found, key=lambda p: _order(p.name), default=None)


def archive_name(version: str) -> str:
    """Apache's name for a release archive."""
    return f"kafka_{SCALA}-{version}.tgz"


def release_version(home: Path) -> str | None:
    """What the jar of the broker in an unpacked release is named after; None where there is none."""
    for jar in sorted((home / "libs").glob("kafka_*.jar")):
        if match := re.fullmatch(rf"kafka_[\d.]+-({VERSION_PATTERN})\.jar", jar.name):
            return match[1]
    return None


def _order(version: str) -> tuple[tuple[int, ...], bool, str]:
    numbers, _, candidate = version.partition("-")
    return tuple(int(n) for n in numbers.split(".")), not candidate, candidate
