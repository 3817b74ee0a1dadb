"""Which policy version sampled which of a request's tokens, from the token counts at each change of version."""

from __future__ import annotations

from .protocol import VersionSpan


class VersionMarks:
    """The changes of version that one request has lived through."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[tuple[int, int]] = []

    def mark(self, version: int, count: int) -> None:
        """`count` tokens were there when `version` ended."""
        self._marks.append((version, count))

    def spans(self, version: int, count: int) -> tuple[VersionSpan, ...]:
        """The spans that tile [0, count), the last of them under `version`."""
        spans, start = [], 0
        for past, end in [*self._marks, (version, count)]:
            if end > start:
                spans.append(VersionSpan(version=past, start=start, end=end))
                start = end
        return tuple(spans)
