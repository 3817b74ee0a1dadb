"""Unpacks a release archive whole or not at all, and nothing outside its folder."""

from __future__ import annotations

import errno
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

from ...schemas.errors import ConfigError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NoRoomError(ConfigError):
    """The disk, a quota or a limit of file size is exhausted."""


def unpack_release(archive: Path, target: Path) -> Path:
    """Unpack a verified .tgz with one folder at its top, so that the folder's contents are at `target`.

    It is unpacked beside `target` and renamed, so `target` is never half a release; a `target` that exists
    is left as it is. The caller holds the lock. ConfigError: a member that points outside or is a device,
    no single folder with a libs/ folder in it, a damaged archive, a full disk.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with tarfile.open(archive, "r:gz") as tar:
            # The filter "data" strips a leading slash and refuses "..", links that lead out, and devices.
            tar.extractall(scratch, filter="data")
        tops = list(scratch.iterdir())
        if len(tops) != 1 or not (tops[0] / "libs").is_dir():
            raise ConfigError(f"{archive} is no Apache Kafka release: it needs one folder that holds libs/")
        tops[0].rename(target)
    except tarfile.FilterError as e:
        raise ConfigError(f"{archive} is unsafe and was not unpacked: {e}") from None
    except (tarfile.TarError, EOFError, zlib.error) as e:
        raise ConfigError(f"{archive} is damaged ({e}): remove it and fetch it again") from None
    except OSError as e:
        if e.errno in NO_ROOM:
            raise NoRoomError(
                f"no room to unpack {archive} in {target.parent}: free some, then repeat"
            ) from None
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
