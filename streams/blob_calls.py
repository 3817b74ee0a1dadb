"""Calls to a file system: tried a few times while it is unavailable, and what they raise told as a BlobError."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ..schemas.errors import BlobError, BlobNotFoundError, BlobUnavailableError
from .blob_errors import Redaction, blob_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = (0.2, 1.0)
"""Pauses before a call is tried again; who calls has more patience, or another way."""


class StoreCalls:
    """Makes the calls of one store."""

    def __init__(self, where: str, redact: Redaction, sleep: Callable[[float], object]) -> None:
        """`where`: the store's address, as it is shown."""
        self._where, self._redact, self._sleep = where, redact, sleep

    def write(self, name: str, action: Callable[[], object]) -> None:
        """Writes the blob `name`. Raises BlobError."""
        doing = self._writing(name)
        try:
            self.run(doing, action)
        except FileNotFoundError as e:
            raise self._told(e, doing) from None

    def once(self, name: str, action: Callable[[], T]) -> T:
        """A part of writing the blob `name` that cannot be done twice. Raises BlobError."""
        try:
            return action()
        except OSError as e:
            raise self._told(e, self._writing(name)) from None

    def read(self, name: str, action: Callable[[], T]) -> T:
        """Reads the blob `name`. Raises BlobError, BlobNotFoundError."""
        try:
            return self.run(f"blob {name} cannot be read from {self._where}", action)
        except FileNotFoundError:
            raise BlobNotFoundError(
                f"blob {name} does not exist in {self._where}: `headrace weights gc` or the store's own expiry has "
                "removed it, or store.uri is not the one it was written to"
            ) from None

    def run(self, doing: str, action: Callable[[], T]) -> T:
        """The result of `action`. Raises BlobError, and FileNotFoundError as it is."""
        for pause in (*RETRY_SECONDS, None):
            try:
                return action()
            except FileNotFoundError:
                raise
            except Exception as e:
                error = blob_error(e, doing, self._redact)
                if error is None:
                    raise
                if pause is None or not isinstance(error, BlobUnavailableError):
                    # The cause's own text may hold what was taken out of this one.
                    raise error from None
                logger.warning("%s; again in %.1f s", error, pause)
                self._sleep(pause)
        raise AssertionError("unreachable")

    def _writing(self, name: str) -> str:
        return f"blob {name} cannot be written to {self._where}"

    def _told(self, error: OSError, doing: str) -> BlobError:
        told = blob_error(error, doing, self._redact)
        assert told is not None
        return told
