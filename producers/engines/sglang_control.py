"""The control calls of an SGLang server: pause, load weights from disk, version, read weights back.

Weights go by disk (/update_weights_from_disk), not by /update_weights_from_tensor: that takes a pickle
(ForkingPickler), and headrace neither writes nor asks anyone to read pickles. `flush_cache` is never true: with
requests waiting or running it ends SGLang's scheduler by an assertion (sgl-project/sglang issue 33783).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.dtypes import Dtype
from ...schemas.errors import EngineError
from .sglang_http import ServerConnection, ServerError

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""Of calls that may be repeated without harm."""
SAMPLE_ROWS = 2


class ServerControl:
    """What headrace asks of the server, besides tokens. Every method blocks and raises EngineError."""

    def __init__(self, connection: ServerConnection, *, seconds: float, load_seconds: float) -> None:
        """`seconds`: limit of a call; `load_seconds`: of the server's load of the weights."""
        self._connection, self._seconds, self._load_seconds = connection, seconds, load_seconds

    def info(self) -> dict[str, Any]:
        """The server's settings: /server_info, or what older releases call it."""
        return self._first("/server_info", "/get_server_info")

    def version(self) -> str:
        """The weight version that the server says it serves."""
        answer = self._first("/model_info", "/get_model_info")
        version = answer.get("weight_version")
        if version is None:
            raise EngineError(
                f"{self._connection.url} does not say its weight version; SGLang 0.5.6 or newer is needed"
            )
        return str(version)

    def pause(self, mode: str) -> None:
        """No step is begun after this. `mode`: in_place, retract or abort."""
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Go on."""
        self._post("/continue_generation", {})

    def abort_all(self) -> None:
        """End every request of the server."""
        self._post("/abort_request", {"rid": "", "abort_all": True})

    def load(self, path: Path, version: int) -> None:
        """Load everything from the model directory `path` as `version`, and look that the server says so.

        Asked once: after an answer that did not come nobody knows what is live.
        """
        body = {
            "model_path": str(path),
            # Stated: a server that was started with --load-format dummy would fill in random numbers.
            "load_format": "auto",
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": False,
        }
        answer = self._post("/update_weights_from_disk", body, seconds=self._load_seconds, attempts=1)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"{self._connection.url} did not load the weights: {answer!r:.400}")
        self._must_be(version)

    def rename(self, version: int) -> None:
        """The same weights under another version; requests go on."""
        # By default this call aborts every request.
        body = {"new_version": str(version), "abort_all_requests": False}
        self._post("/update_weight_version", body)
        self._must_be(version)

    def differs(self, name: str, bits: np.ndarray, dtype: Dtype) -> bool | None:
        """Whether the first rows of the live tensor `name` differ from those of `bits`; None: it cannot be read.

        SGLang answers with float32 numbers; it can read back only models that have `get_weights_by_name`.
        """
        try:
            answer = self._post("/get_weights_by_name", {"name": name, "truncate_size": SAMPLE_ROWS})
        except ServerError as e:
            if e.status in (400, 404, 500, 501):
                return None
            raise
        try:
            live = np.asarray(answer, dtype=np.float32)  # null stands for NaN
        except (TypeError, ValueError):
            return None
        expected = _floats(bits[:SAMPLE_ROWS], dtype)
        if live.shape != expected.shape:
            return None  # one rank's part of it, or one copy per data-parallel rank
        # Numbers lose a NaN's payload, nothing else.
        both_nan = np.isnan(live) & np.isnan(expected)
        return not bool(((live.view(np.uint32) == expected.view(np.uint32)) | both_nan).all())

    def _must_be(self, version: int) -> None:
        found = self.version()
        if found != str(version):
            raise EngineError(f"{self._connection.url} says version {found!r} after it was given {version}")

    def _first(self, *paths: str) -> dict[str, Any]:
        for path in paths:
            try:
                answer = self._connection.call("GET", path, seconds=self._seconds, attempts=ATTEMPTS)
            except ServerError as e:
                if e.status == 404 and path != paths[-1]:
                    continue
                raise
            if isinstance(answer, dict):
                return answer
            raise EngineError(f"{self._connection.url}{path} answered something else than a description")
        raise AssertionError("at least one path")

    def _post(
        self, path: str, body: dict[str, Any], *, seconds: float | None = None, attempts: int = ATTEMPTS
    ) -> Any:
        return self._connection.call(
            "POST", path, body, seconds=self._seconds if seconds is None else seconds, attempts=attempts
        )


def _floats(bits: np.ndarray, dtype: Dtype) -> np.ndarray:
    """float32 values of bit patterns."""
    if dtype is Dtype.BF16:
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
    if dtype is Dtype.FP16:
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return np.ascontiguousarray(bits).view(np.float32)
