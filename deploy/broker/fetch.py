"""`headrace broker fetch`: an Apache Kafka release into the user's data folder, verified before it is unpacked.

A release comes from Apache's sites, a mirror, an archive or an unpacked release at hand. One fetch at a time works
in the folder; what an interrupted one downloaded is gone on with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...schemas.errors import ConfigError
from .apache import find_jars
from .checksum import check_sha512, parse_sha512
from .data_dir import VERSION, VERSION_PATTERN, archive_name, release_version, releases_dir
from .download import NotThereError, Progress, discard, download, read_small
from .unpack import NO_ROOM, NoRoomError, unpack_release

SITES = ("https://downloads.apache.org/kafka", "https://archive.apache.org/dist/kafka")
"""The first has the supported releases, the second all that there ever were."""
SUFFIX = ".sha512"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A release that is ready to start."""

    version: str
    path: Path
    source: str | None
    """A URL, an archive or a folder; None: it was there already."""
    sha512: str | None
    """Of the archive; None for a folder, or when it was there already."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"path": str(self.path), "already_there": self.source is None}


def fetch(
    version: str | None = None,
    origin: str | None = None,
    sha512: str | None = None,
    *,
    folder: Path | None = None,
    sites: tuple[str, ...] = SITES,
    say: Say = lambda text: None,
    progress: Progress = lambda done, total: None,
    pause_s: float = 1.0,
) -> Fetched:
    """Have release `version` in `folder`/<version> (by default VERSION, in the user's data folder).

    `origin`: a folder, an archive or a URL in place of `sites`. `sha512`: hex, in place of the one published
    beside the archive. Raises ConfigError: what is missing, damaged, not what was published, or has no room.
    """
    if sha512 is not None and re.fullmatch(r"[0-9A-Fa-f]{128}", sha512) is None:
        raise ConfigError(f"--sha512 {sha512[:20]!r}...: a SHA-512 has 128 hexadecimal digits")
    version = _version(version, origin)
    folder = (folder or releases_dir()).absolute()
    target = folder / version
    with _locked(folder, say):
        if target.exists():
            try:
                find_jars(target)
            except ConfigError as e:
                raise ConfigError(f"{target} was damaged: remove it, then fetch it again ({e})") from None
            return Fetched(version=version, path=target, source=None, sha512=None)
        for left in folder.glob(f".{version}-*"):
            # Of an unpacking that was killed; we hold the lock.
            shutil.rmtree(left, ignore_errors=True)
        if origin is None:
            return _from_sites(version, sites, target, sha512, say, progress, pause_s)
        if _is_url(origin):
            urls = _mirror_urls(origin, version)
            return _from_sites(version, urls, target, sha512, say, progress, pause_s, whole=True)
        local = Path(origin).expanduser()
        if local.is_dir():
            return _from_folder(version, local, target, say)
        return _from_archive(version, local, target, sha512, say)


def _version(version: str | None, origin: str | None) -> str:
    found = None
    if origin is not None and (_is_url(origin) or not Path(origin).expanduser().is_dir()):
        path = urlsplit(origin).path if _is_url(origin) else origin
        match = re.search(rf"kafka_[\d.]+-({VERSION_PATTERN})\.tgz$", path)
        found = match[1] if match is not None else None
    elif origin is not None:
        found = release_version(Path(origin).expanduser())
    if version is not None and found is not None and version != found:
        raise ConfigError(f"--version {version}, but {origin} is {found}")
    wanted = version or found or VERSION
    if re.fullmatch(VERSION_PATTERN, wanted) is None:
        raise ConfigError(f"--version {wanted!r}: write it as Apache does, such as {VERSION}")
    return wanted


def _from_sites(
    version: str,
    bases: tuple[str, ...],
    target: Path,
    sha512: str | None,
    say: Say,
    progress: Progress,
    pause_s: float,
    *,
    whole: bool = False,
) -> Fetched:
    """`whole`: the bases are URLs of the archive itself."""
    name = archive_name(version)
    urls = list(bases) if whole else [f"{base}/{version}/{name}" for base in bases]
    part = target.parent / f"{name}.part"
    tried: list[str] = []
    for url in urls:
        try:
            own = Path(urlsplit(url).path).name
            expected = sha512.lower() if sha512 else parse_sha512(read_small(url + SUFFIX), own)
            say(f"downloading {url}")
            download(url, part, progress, pause_s=pause_s)
        except NotThereError as e:
            tried.append(str(e))
            continue
        say("checking its SHA-512" if sha512 is None else "checking it against --sha512")
        try:
            check_sha512(part, expected)
            say(f"unpacking into {target}")
            unpack_release(part, target)
        except NoRoomError:
            raise
        except ConfigError as e:
            # It is whole, and no good: to go on with it would fail for ever.
            discard(part)
            text = (
                str(e)
                .replace("remove it and fetch it again", "it was removed: fetch it again")
                .replace(str(part), url)
            )
            raise ConfigError(text) from None
        discard(part)
        return _ready(version, target, url, expected)
    raise ConfigError(
        f"Apache Kafka {version} was not fetched, and nothing was changed:\n"
        + "\n".join(f"  {line}" for line in tried)
        + "\nIs there a network, and is that version published? Behind a firewall: fetch the archive and its "
        f"{SUFFIX} elsewhere and give --from FILE, or give a mirror with --from URL"
    )


def _mirror_urls(origin: str, version: str) -> tuple[str, ...]:
    if urlsplit(origin).path.endswith(".tgz"):
        return (origin,)
    base = origin.rstrip("/")
    return (f"{base}/{version}/{archive_name(version)}", f"{base}/{archive_name(version)}")


def _from_archive(version: str, archive: Path, target: Path, sha512: str | None, say: Say) -> Fetched:
    if not archive.is_file():
        raise ConfigError(f"--from {archive}: there is no such file or folder")
    if sha512 is None:
        beside = archive.with_name(archive.name + SUFFIX)
        if not beside.is_file():
            raise ConfigError(
                f"{archive} cannot be verified: put {beside.name}, which Apache publishes beside the archive, next "
                "to it, or give the sum with --sha512"
            )
        sha512 = parse_sha512(beside.read_text(errors="replace"), archive.name)
    say(f"checking {archive}")
    check_sha512(archive, sha512)
    say(f"unpacking into {target}")
    unpack_release(archive, target)
    return _ready(version, target, str(archive), sha512.lower())


def _from_folder(version: str, source: Path, target: Path, say: Say) -> Fetched:
    find_jars(source)
    say(f"copying {source} to {target}")
    scratch = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=target.parent))
    try:
        shutil.copytree(source, scratch / version)
        (scratch / version).rename(target)
    except shutil.Error as e:
        raise ConfigError(f"{source} could not be copied to {target}: {e.args[0][0][2]}") from None
    except OSError as e:
        if e.errno in NO_ROOM:
            raise NoRoomError(f"no room to copy {source} to {target}: free some, then repeat") from None
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _ready(version, target, str(source), None)


def _ready(version: str, target: Path, source: str, sha512: str | None) -> Fetched:
    try:
        find_jars(target)
    except ConfigError:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(f"{source} is no Apache Kafka release: it has no libs/kafka_*.jar") from None
    return Fetched(version=version, path=target, source=source, sha512=sha512)


def _is_url(origin: str) -> bool:
    scheme, colon, _ = origin.partition("://")
    if colon and scheme not in ("http", "https"):
        raise ConfigError(f"--from {origin}: only http and https, a file or a folder")
    return bool(colon)


@contextlib.contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Hold `folder`; another fetch is waited for. The lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
    except OSError as e:
        raise ConfigError(
            f"{folder} cannot be made and written to ({e.strerror}): choose another with HEADRACE_DATA"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            say(f"waiting for another fetch (process {lock.read().strip() or 'unknown'})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
