"""Which policy version sampled which token of a server's answer, and when nobody can say.

The server's own spans are the only authority for a request that crossed an update: what has arrived here when a
pause begins is not what had been sampled then. A server without them names one version for the whole answer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ...schemas.errors import EngineError
from .protocol import VersionSpan
from .sglang_wire import Sampled, Span


class ForeignVersionError(EngineError):
    """The server sampled under weights that this engine has not given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """What a request has lived through, as this engine knows it."""

    oldest: int
    """The oldest version whose weights were live when it was sent; versions without a change have the same weights."""
    admitted: int
    """The version it was sent under."""
    newest: int
    """The newest version that the server may have had when it answered."""
    crossed: bool
    """A load of weights began while it was in flight."""
    aborting: bool
    """Pauses end every request before the weights change."""


def attribute(sampled: Sampled, lived: Lived) -> tuple[VersionSpan, ...]:
    """Spans that tile the tokens. ForeignVersionError; EngineError where nobody knows."""
    count = len(sampled.token_ids)
    if sampled.spans is not None:
        return _native(sampled.spans, count, lived)
    if sampled.version is None:
        raise EngineError("the server's answers have no weight_version; SGLang 0.5.6 or newer is needed")
    version = _known(sampled.version, lived)
    if not lived.crossed:
        # One set of weights, maybe under two names: the older one bounds the lag.
        version = lived.admitted
    elif not lived.aborting:
        raise EngineError(
            "the request crossed an update and this SGLang does not say which of its tokens came before"
            ' (no weight_versions): use a newer one, or engine.sglang.pause_mode = "abort"'
        )
    return (VersionSpan(version=version, start=0, end=count),)


def _native(given: tuple[Span, ...], count: int, lived: Lived) -> tuple[VersionSpan, ...]:
    spans, at = [], 0
    for version, start, end in given:
        if start != at or end <= start:
            raise EngineError(f"the server's weight_versions {given} do not tile {count} tokens")
        spans.append(VersionSpan(version=_known(version, lived), start=start, end=end))
        at = end
    if at != count:
        raise EngineError(f"the server's weight_versions {given} do not tile {count} tokens")
    if any(a.version > b.version for a, b in itertools.pairwise(spans)):
        raise EngineError(f"the server's weight_versions {given} go back")
    return tuple(spans)


def _known(version: str, lived: Lived) -> int:
    if not version.isdecimal() or not lived.oldest <= int(version) <= lived.newest:
        raise ForeignVersionError(
            f"the server sampled under version {version!r}, live was {lived.oldest} to {lived.newest}"
        )
    return int(version)
