"""What an object store raises -> a BlobError that says what happened and how to mend it, without credentials."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..schemas.errors import BlobError, BlobUnavailableError

_LIBRARIES = {
    "botocore",
    "aiobotocore",
    "aiohttp",
    "gcsfs",
    "google",
    "azure",
    "adlfs",
    "paramiko",
    "requests",
    "urllib3",
}
"""Stores raise these packages' exceptions beside OSError."""
_AWAY = {
    "HTTPClientError",
    "ConnectionError",
    "ClientConnectionError",
    "ClientPayloadError",
    "IncompleteReadError",
    "ServiceRequestError",
}
"""Names of exceptions, or of their bases, of a store that does not answer."""
_AWAY_ERRNO = {
    errno.EBUSY,
    errno.EAGAIN,
    errno.EREMOTEIO,
    errno.ETIMEDOUT,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EPIPE,
}
_SECRET_KEY = re.compile(
    r"secret|token|password|passwd|credential|account_key|sas|^key$|^pass$", re.IGNORECASE
)
_SECRET_VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "AZURE_STORAGE_KEY")
_HIDDEN = "***"


class Redaction:
    """Takes credentials out of texts: those of URLs, of the file system's options, of the environment."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})

    def __call__(self, text: str) -> str:
        """`text` with *** in place of every credential."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        text = re.sub(r"//[^/@\s]*@", f"//{_HIDDEN}@", text)
        pattern = (
            r"(?i)([?&;][^=&\s]*(?:secret|token|password|signature|credential|sig|key)[^=&\s]*=)[^&\s'\"]+"
        )
        return re.sub(pattern, rf"\1{_HIDDEN}", text)

    def _secrets(self) -> Iterable[str]:
        for name in _SECRET_VARIABLES:
            value = os.environ.get(name, "")
            if len(value) >= 4:
                yield value
        yield from _secret_values(self._options)


def blob_error(error: Exception, doing: str, redact: Redaction) -> BlobError | None:
    """The BlobError for what a file system raised while `doing`; None: not the store's, a defect of the program."""
    if isinstance(error, BlobError):
        return error
    if not isinstance(error, OSError) and not _of_library(error):
        return None
    told = redact(f"{doing}: {_text(error)}")
    if _is_away(error):
        return BlobUnavailableError(
            f"{told}. The store does not answer as it should: look at its state, the address (store.uri, "
            "AWS_ENDPOINT_URL) and the network"
        )
    hint = _hint(error)
    return BlobError(f"{told}. {hint}" if hint else told)


def _hint(error: Exception) -> str:
    names = _names(error)
    if "NoCredentialsError" in names or "PartialCredentialsError" in names:
        return "Give credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role"
    if isinstance(error, PermissionError):
        return "Check that this user, or these credentials, may read, write, list and delete under store.uri"
    if isinstance(error, FileNotFoundError):
        return "Check store.uri: its bucket or folder does not exist; create it"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "Free some space: `headrace weights gc` shows which old versions can go; what comes from or goes to a remote "
            "store is held in the folder for temporary files (TMPDIR)"
        )
    return ""


def _is_away(error: Exception) -> bool:
    status = _status(error) or _status(error.__cause__)
    if status is not None:
        return status >= 500 or status == 429
    if isinstance(error, TimeoutError | ConnectionError) or not _AWAY.isdisjoint(_names(error)):
        return True
    return isinstance(error, OSError) and error.errno in _AWAY_ERRNO


def _status(error: BaseException | None) -> int | None:
    """The HTTP status that a library's exception carries."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int) and 100 <= found < 600:
            return found
    return None


def _text(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _names(error: Exception) -> set[str]:
    return {c.__name__ for c in type(error).__mro__}


def _of_library(error: Exception) -> bool:
    return any(c.__module__.partition(".")[0] in _LIBRARIES for c in type(error).__mro__)


def _secret_values(options: Mapping[str, Any]) -> Iterable[str]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_values(value)
        elif isinstance(value, str) and len(value) >= 4 and _SECRET_KEY.search(key):
            yield value
