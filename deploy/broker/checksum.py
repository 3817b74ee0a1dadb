"""Apache's SHA-512 files: what is published beside a release archive, read and compared."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from ...schemas.errors import ConfigError

_HEX_DIGITS = 128
_CHUNK = 1 << 20


def parse_sha512(text: str, name: str) -> str:
    """The SHA-512 of the file `name`, lower-case hex, 128 digits.

    Both of Apache's forms: `NAME: 0A1B2C3D ...` over several lines (`gpg --print-md`) and `hex  NAME`
    (`sha512sum`); a bare sum too. ConfigError when the text holds none, or one for another file.
    """
    stripped = text.strip()
    plain = re.fullmatch(r"([0-9A-Fa-f]{128})(?:[ \t]+\*?(\S+))?", stripped)
    if plain is not None:
        digits, named = plain.group(1), plain.group(2)
    else:
        head, colon, groups = stripped.partition(":")
        digits, named = "".join(groups.split()), head.strip() if colon else None
    if re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX_DIGITS}}}", digits) is None:
        raise ConfigError(
            f"the SHA-512 file of {name} holds no SHA-512 (it begins with {stripped[:60]!r}): "
            "take the file that Apache publishes beside the archive"
        )
    if named is not None and Path(named).name != name:
        raise ConfigError(
            f"the SHA-512 file is that of {named}, not of {name}: take the one beside the archive"
        )
    return digits.lower()


def check_sha512(archive: Path, expected: str) -> None:
    """ConfigError unless the file's SHA-512 is `expected` (hex, any case)."""
    digest = hashlib.sha512()
    with archive.open("rb") as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
    if not hmac.compare_digest(digest.hexdigest(), expected.lower()):
        raise ConfigError(
            f"{archive} is not what was published: its SHA-512 is {digest.hexdigest()[:16]}..., expected "
            f"{expected.lower()[:16]}...; remove it and fetch it again"
        )
