"""When two requests say the same: keys of messages, and of each prefix of a conversation.

Not compared: who calls a system message developer's, white space around an answer, spelling and key order of tool
arguments, ids of calls, and reasoning (the session's thinking policy compares that on the path it has found).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence

from .messages import Message, Role, Tool

Key = bytes
"""16 bytes of BLAKE2b."""

_SHORT = 512
"""Characters of arguments that are remembered: the same short ones come again with every request of a session."""

_START: Key = bytes(16)


def prefix_keys(messages: Iterable[Message], start: Key = _START) -> list[Key]:
    """[i]: the key of the conversation up to and including message i, after what `start` is the key of."""
    keys, key = [], start
    for message in messages:
        key = next_key(key, message)
        keys.append(key)
    return keys


def next_key(key: Key, message: Message) -> Key:
    """The key of a conversation, known by `key`, and one more message."""
    assistant = message.role is Role.ASSISTANT
    text = message.text.strip() if assistant else message.text
    role = Role.SYSTEM if message.role is Role.DEVELOPER else message.role
    body = text.encode("utf-8", "surrogatepass")
    # Lengths before contents: no two different messages give the same bytes.
    parts = [key, f"{role}\0{len(body)}\0".encode(), body]
    for call in message.tool_calls:
        parts.append(canonical_json(call.arguments))
        parts.append(f"\0{call.name}\0{len(parts[-1])}\0".encode("utf-8", "surrogatepass"))
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def tools_key(tools: Sequence[Tool]) -> Key:
    """Of the tools in their order; the key order of their schemas does not matter."""
    listed = [[tool.name, tool.description, tool.parameters] for tool in tools]
    return hashlib.blake2b(json.dumps(listed, sort_keys=True).encode(), digest_size=16).digest()


def same_reasoning(stored: str | None, replayed: str | None) -> bool:
    """Whether a client that replays `replayed` has left a turn's reasoning alone. Dropping it is not altering it."""
    return replayed is None or replayed.strip() == (stored or "").strip()


def canonical_json(text: str) -> bytes:
    """The same bytes for the same JSON value; text that is not JSON is itself, stripped."""
    return _short_canonical(text) if len(text) <= _SHORT else _canonical(text)


def _canonical(text: str) -> bytes:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip().encode("utf-8", "surrogatepass")
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


_short_canonical = functools.lru_cache(maxsize=4096)(_canonical)
