"""Two accounts of which version sampled which token must agree: vLLM's, and ours from the counts at every pause."""

from __future__ import annotations

from collections.abc import Sequence

from ....schemas.errors import EngineError
from ..protocol import VersionSpan


def check_spans(
    spans: Sequence[VersionSpan], marks: Sequence[tuple[int, int]], count: int, *, exact: bool
) -> None:
    """EngineError unless `spans` tile [0, count) and change version where `marks` say.

    `marks`: (version that ended at a pause, tokens that had been handed over by then). Not `exact`: tokens may have
    been on their way, so that a version can have ended later than it seemed, never earlier.
    """
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            raise EngineError(f"vLLM's version spans do not tile {count} tokens: {list(spans)}")
        at = span.end
    if at != count:
        raise EngineError(f"vLLM's version spans end at {at} of {count} tokens: {list(spans)}")
    for version, there in marks:
        last = max((s.end for s in spans if s.version <= version), default=0)
        if last < there or (exact and last > there):
            raise EngineError(
                f"version {version} ended after {there} tokens, and after {last} by vLLM's account: {list(spans)}"
            )
