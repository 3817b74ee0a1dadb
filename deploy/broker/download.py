"""Downloads one file over HTTP, and goes on where an earlier attempt ended.

The caller checks what came: a resumed file is only as good as its sum. Beside FILE.part lies FILE.part.from,
which says of which URL and which state of it (ETag or Last-Modified) the part is.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...schemas.errors import ConfigError
from .unpack import NO_ROOM, NoRoomError

TIMEOUT_SECONDS = 30.0
"""Without a byte."""
ATTEMPTS = 4
CHUNK = 1 << 18
SMALL = 1 << 16

Progress = Callable[[int, int | None], None]
"""Called with the bytes that are there, and with how many there will be where the server tells."""


class NotThereError(ConfigError):
    """The server has no such file, or there is no such server."""


class CutError(ConfigError):
    """The connection ended early. The part is kept: a repeat goes on from there."""


def read_small(url: str) -> str:
    """A short text file. Raises NotThereError, CutError."""
    with _open(url, {}) as answer:
        try:
            return bytes(answer.read(SMALL)).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as e:
            raise CutError(f"{url} did not come whole ({_why(e)}): repeat the command") from None


def download(
    url: str, part: Path, progress: Progress, *, attempts: int = ATTEMPTS, pause_s: float = 1.0
) -> None:
    """Bring `part` to the whole of `url`, going on from what it holds; a cut connection is tried again.

    Raises NotThereError, NoRoomError, or CutError after `attempts` that brought nothing new.
    """
    left = attempts
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _attempt(url, part, progress)
        except CutError:
            grew = part.exists() and part.stat().st_size > before
            left = attempts - 1 if grew else left - 1
            if left <= 0:
                raise
            time.sleep(pause_s)


def _attempt(url: str, part: Path, progress: Progress) -> None:
    there = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={there}-"} if there else {}
    known = _origin(part)
    # Another server's ETag means nothing here; the sum is what counts.
    if there and known.get("url") == url and known.get("state"):
        headers["If-Range"] = known["state"]
    try:
        answer = _open(url, headers)
    except _RangeError as e:
        if e.total == there:
            return
        part.unlink()
        return _attempt(url, part, progress)
    with answer:
        resumed = answer.status == 206
        if resumed and not _starts_at(answer, there):
            raise CutError(f"{url}: the server sent another range than asked for; remove {part} and repeat")
        there = there if resumed else 0
        length = answer.headers.get("Content-Length")
        total = there + int(length) if length is not None and length.isdigit() else None
        try:
            with part.open("ab" if resumed else "wb") as out:
                _origin_file(part).write_text(json.dumps({"url": url, "state": _state(answer)}))
                progress(there, total)
                while chunk := _read(answer, url):
                    out.write(chunk)
                    there += len(chunk)
                    progress(there, total)
        except OSError as e:
            if e.errno in NO_ROOM:
                raise NoRoomError(
                    f"no room for {part} ({there} bytes of {total or 'an unknown size'} are there): free some, "
                    "then repeat the command; it goes on from there"
                ) from None
            raise
    if total is not None and there != total:
        raise CutError(
            f"{url} was cut after {there} of {total} bytes: repeat the command; it goes on from there"
        )


def discard(part: Path) -> None:
    """Remove a part and what is known of it."""
    part.unlink(missing_ok=True)
    _origin_file(part).unlink(missing_ok=True)


class _RangeError(Exception):
    """416; `total` is the size of the file where the server tells."""

    def __init__(self, total: int | None) -> None:
        super().__init__()
        self.total = total


def _open(url: str, headers: dict[str, str]) -> Any:
    request = urllib.request.Request(
        url, headers={"User-Agent": "headrace", "Accept-Encoding": "identity"} | headers
    )
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code == 416 and "Range" in headers:
            match = re.fullmatch(r"bytes \*/(\d+)", e.headers.get("Content-Range", ""))
            raise _RangeError(int(match[1]) if match else None) from None
        if e.code >= 500:
            raise CutError(f"{url}: the server answers {e.code} {e.reason}; try again later") from None
        raise NotThereError(f"{url}: the server answers {e.code} {e.reason}") from None
    except urllib.error.URLError as e:
        raise NotThereError(f"{url}: no answer ({_why(e.reason)})") from None
    except (OSError, http.client.HTTPException) as e:
        raise CutError(f"{url}: {_why(e)}") from None


def _read(answer: Any, url: str) -> bytes:
    try:
        return bytes(answer.read(CHUNK))
    except (OSError, http.client.HTTPException) as e:
        raise CutError(f"{url} was cut ({_why(e)}): repeat the command; it goes on from there") from None


def _starts_at(answer: Any, offset: int) -> bool:
    return str(answer.headers.get("Content-Range", "")).startswith(f"bytes {offset}-")


def _state(answer: Any) -> str | None:
    tag = answer.headers.get("ETag")
    # If-Range compares strongly: a weak tag would never match.
    return tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified")


def _origin_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.from")


def _origin(part: Path) -> dict[str, Any]:
    try:
        found = json.loads(_origin_file(part).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _why(e: object) -> str:
    return (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
