"""A dead letter is the original key, value and headers, byte for byte, plus headers that say where from and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .codec import Headers, header

PREFIX = "headrace-dlq-"
MAX_DETAIL = 500


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


def dead_letter_headers(original: Sequence[tuple[str, bytes]], letter: DeadLetter) -> Headers:
    """The original headers without earlier dead-letter ones, then this letter's."""
    fields = {
        "stage": letter.stage,
        "topic": letter.topic,
        "partition": str(letter.partition),
        "offset": str(letter.offset),
        "reason": letter.reason,
        "detail": letter.detail[:MAX_DETAIL],
        "at-ms": str(letter.at_ms),
    }
    return original_headers(original) + [
        (PREFIX + k, v.encode("utf-8", "replace")) for k, v in fields.items()
    ]


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
