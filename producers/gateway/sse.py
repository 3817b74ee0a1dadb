"""Server-sent events: the framing, which all three APIs share."""

from __future__ import annotations

import json
from typing import Any

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
COMMENT = b": keep-alive\n\n"
"""Clients read over it, and proxies see that the connection is in use."""
DONE = b"data: [DONE]\n\n"


def dumps(tree: Any) -> bytes:
    """JSON as the APIs send it."""
    try:
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which a model has written as an escape in its JSON
        return json.dumps(tree, separators=(",", ":")).encode()


def frame(tree: Any, event: str | None = None) -> bytes:
    """One event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + dumps(tree) + b"\n\n"
