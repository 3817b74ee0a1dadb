"""A dead letter is the original key, value and headers, byte for byte, plus headers that say where from and why.

One that would be too large is cut, and says so: where the original lies is in every letter. What was requeued or
dropped is told by a marker, a record of the same topic without a value: the log cannot delete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .codec import Headers, header

PREFIX = "headrace-dlq-"
MAX_DETAIL = 500
MAX_LETTER = 5 * 2**20 - 2**16
"""Bytes of key, value and headers that are sure to fit the topic's max.message.bytes (schemas/topics.py)."""
CUT = 2**14
"""Bytes that are kept of each part of a letter that is cut."""
REQUEUES = PREFIX + "requeues"
"""How many times the record has been requeued; it stays on the record, so that the limit holds."""
TRUNCATED = PREFIX + "truncated"
"""Bytes of the original value, on a letter that was cut."""
SETTLED = PREFIX + "settled"
"""On a marker: `requeued` or `dropped`."""
SETTLES = PREFIX + "settles"
"""On a marker: the offset of the letter that it settles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Where a record came from and why nobody could use it."""

    stage: str
    topic: str
    partition: int
    offset: int
    reason: str
    detail: str
    at_ms: int
    """Unix milliseconds."""


class OpenLetters:
    """Which records of the topic's one partition are letters that nobody has settled."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def take(self, offset: int, headers: Sequence[tuple[str, bytes]]) -> None:
        """The next record, in order: a letter, or a marker that settles one."""
        marks = header(headers, SETTLES)
        if marks is not None and marks.isdecimal():
            self._open.discard(int(marks))
        else:
            self._open.add(offset)


def dead_letter_headers(original: Sequence[tuple[str, bytes]], letter: DeadLetter) -> Headers:
    """The original headers without earlier dead-letter ones but their counter, then this letter's."""
    fields = {
        "stage": letter.stage,
        "topic": letter.topic,
        "partition": str(letter.partition),
        "offset": str(letter.offset),
        "reason": letter.reason,
        "detail": letter.detail[:MAX_DETAIL],
        "at-ms": str(letter.at_ms),
    }
    counter = [(k, v) for k, v in original if k == REQUEUES][:1]
    return (
        original_headers(original)
        + counter
        + [(PREFIX + k, v.encode("utf-8", "replace")) for k, v in fields.items()]
    )


def dead_letter_record(
    key: bytes | None,
    value: bytes | None,
    headers: Sequence[tuple[str, bytes]],
    letter: DeadLetter,
    *,
    limit: int = MAX_LETTER,
) -> tuple[bytes | None, bytes | None, Headers]:
    """Key, value and headers of the letter of a record; cut where they would be larger than `limit` bytes.

    A cut letter keeps the first CUT bytes of key and value, and of the original headers those that fit CUT.
    """
    ours = dead_letter_headers(headers, letter)
    if _size(key) + _size(value) + _headers_size(ours) <= limit:
        return key, value, ours
    kept: Headers = []
    for name, content in headers:
        if _headers_size([*kept, (name, content)]) <= CUT:
            kept.append((name, content))
    ours = [*dead_letter_headers(kept, letter), (TRUNCATED, str(_size(value)).encode())]
    return key and key[:CUT], value and value[:CUT], ours


def requeues_of(headers: Sequence[tuple[str, bytes]]) -> int:
    """How many times the record has been requeued."""
    text = header(headers, REQUEUES) or ""
    return int(text) if text.isdecimal() else 0


def _size(data: bytes | None) -> int:
    return len(data or b"")


def _headers_size(headers: Sequence[tuple[str, bytes | None]]) -> int:
    return sum(len(k.encode("utf-8", "replace")) + _size(v) + 10 for k, v in headers)


def original_headers(headers: Sequence[tuple[str, bytes]]) -> Headers:
    """What the record carried before it became a dead letter."""
    return [(k, v) for k, v in headers if not k.startswith(PREFIX)]


def read_dead_letter(headers: Sequence[tuple[str, bytes]]) -> DeadLetter:
    """The letter in `headers`; fields that are missing or broken read as empty or -1."""

    def text(name: str) -> str:
        return header(headers, PREFIX + name) or ""

    def number(name: str) -> int:
        value = text(name)
        return int(value) if value.lstrip("-").isdigit() else -1

    return DeadLetter(
        stage=text("stage"),
        topic=text("topic"),
        partition=number("partition"),
        offset=number("offset"),
        reason=text("reason"),
        detail=text("detail"),
        at_ms=number("at-ms"),
    )
