"""Java's class-data-sharing archive for Kafka: written when a broker first stops, it halves every later start.

It lies in the user's cache folder under a name made of the Java and the jars it belongs to; a broker without
one writes its own next to its data, and it moves to the cache after a clean stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NEW = "classes.jsa.new"
_KEY = "classes.key"


@dataclass(frozen=True, slots=True)
class ArchiveFlags:
    """Java options: `use` an archive that exists, or `make` one at exit."""

    use: list[str]
    make: list[str]


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/headrace, or ~/.cache/headrace."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "headrace"


def flags(java: Path, jars: Sequence[Path], data_dir: Path) -> ArchiveFlags:
    """The options for a broker with its data in `data_dir`."""
    archive = cache_dir() / f"kafka-{_key(java, jars)}.jsa"
    if archive.exists():
        return ArchiveFlags(
            use=["-Xshare:auto", "-Xlog:cds=off", f"-XX:SharedArchiveFile={archive}"], make=[]
        )
    (data_dir / _KEY).write_text(str(archive))
    return ArchiveFlags(use=[], make=["-Xlog:cds=off", f"-XX:ArchiveClassesAtExit={data_dir / _NEW}"])


def keep(data_dir: Path) -> None:
    """After a clean stop: move the archive that the broker wrote to the cache. A cache is never worth an error."""
    new, key = data_dir / _NEW, data_dir / _KEY
    if not (new.exists() and key.exists()):
        return
    archive = Path(key.read_text())
    with contextlib.suppress(OSError):
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_name(f"{archive.name}.{os.getpid()}")
        shutil.move(new, partial)
        # Another run may start from it at this moment: it appears whole or not at all.
        partial.replace(archive)
    new.unlink(missing_ok=True)
    key.unlink(missing_ok=True)


def _key(java: Path, jars: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in (java.resolve(), *jars):
        stat = path.stat()
        digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
