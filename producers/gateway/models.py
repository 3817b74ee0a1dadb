"""Which model names are served: the policy's own, and those that harnesses send without being told to."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from .errors import RequestError

CREATED = 1735689600
"""OpenAI's list wants a date; this one says nothing."""


class Models:
    """Names of one policy."""

    def __init__(self, policy_id: str, patterns: Sequence[str] = ()) -> None:
        """`patterns`: shell patterns of further names that mean this policy."""
        self._policy_id, self._patterns = policy_id, tuple(patterns)

    def check(self, name: str) -> None:
        """Raise RequestError 404 for a name that is not served."""
        if name == self._policy_id or any(fnmatch.fnmatchcase(name, p) for p in self._patterns):
            return
        others = f", and names like {', '.join(self._patterns)}" if self._patterns else ""
        raise RequestError(
            f"model: {name[:100]!r} is not served here; use {self._policy_id!r}{others} (gateway.models)",
            status=404,
            param="model",
            code="model_not_found",
        )

    def listed(self, *, anthropic: bool) -> dict[str, Any]:
        """The body of GET /v1/models."""
        data = [self.one(self._policy_id, anthropic=anthropic)]
        if anthropic:
            return {
                "data": data,
                "has_more": False,
                "first_id": self._policy_id,
                "last_id": self._policy_id,
            }
        return {"object": "list", "data": data}

    def one(self, name: str, *, anthropic: bool) -> dict[str, Any]:
        """One entry."""
        if anthropic:
            return {"type": "model", "id": name, "display_name": name, "created_at": "2025-01-01T00:00:00Z"}
        return {"id": name, "object": "model", "created": CREATED, "owned_by": "headrace"}
