"""Tokens from engines as they come, for one choice of a turn.

An engine client may offer `stream(request)`, an asynchronous iterator of pieces; without it the whole turn is one
piece. When an engine dies in the middle, another goes on from the tokens that are there: they are ids, so nothing
is lost or said twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from ...schemas.errors import EngineError
from ..engines.protocol import GenerateRequest, GenerateResult, VersionSpan
from ..rollout.engine_pool import EnginePool
from .errors import busy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some tokens of a turn, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As many, unless the engine is broken."""
    version_spans: tuple[VersionSpan, ...]
    """Tile [0, len(token_ids)) of this piece."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort` in the last piece."""


@dataclass(slots=True)
class Sampled:
    """The pieces of one choice, added up."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = "abort"
    engine_id: str = ""

    def add(self, piece: Piece, taken: int) -> None:
        """The first `taken` tokens of `piece`: what a stop string has cut off was never part of the turn."""
        start = len(self.token_ids)
        self.token_ids += piece.token_ids[:taken]
        self.logprobs += piece.logprobs[:taken]
        for s in piece.version_spans:
            span = VersionSpan(s.version, start + s.start, start + min(s.end, taken))
            if span.start >= span.end:
                continue
            if self.spans and self.spans[-1].version == span.version and self.spans[-1].end == span.start:
                span = VersionSpan(span.version, self.spans.pop().start, span.end)
            self.spans.append(span)

    def result(self) -> GenerateResult:
        """As an engine would have given it."""
        return GenerateResult(
            request_id=self.request_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=tuple(self.spans),
            finish_reason=self.finish_reason,
        )


class Sampler:
    """Asks the engines of a pool."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        patience: float = 20.0,
        pause: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: seconds that a turn waits for an engine that failed or updates; `pause`: between tries."""
        self._pool = pool
        self._patience, self._pause, self._clock = patience, pause, clock

    @property
    def version(self) -> int:
        """The newest policy version that an engine has reported."""
        return self._pool.version

    @property
    def ready(self) -> bool:
        """Whether some engine can be asked now."""
        return self._pool.ready

    async def stream(
        self, request: GenerateRequest, prefer: str | None = None
    ) -> AsyncGenerator[tuple[str, Piece], None]:
        """(engine_id, piece) until the turn ends. `prefer`: who holds the prefix. RequestError 503 at last."""
        deadline = self._clock() + self._patience
        failure: EngineError | None = None
        left = request
        while True:
            engine_id = self._pool.choose(prefer)
            if engine_id is None:
                if self._clock() >= deadline:
                    raise busy(
                        f"no engine can serve this now ({failure or 'none is known'}); try again later"
                    )
                await self._pool.wait(self._pause)
                continue
            try:
                with self._pool.asking(engine_id) as client:
                    async with aclosing(pieces(client, left)) as found:
                        async for piece in found:
                            left = _after(left, piece)
                            if piece.finish_reason == "abort":  # not by us: another goes on
                                yield engine_id, replace(piece, finish_reason=None)
                                break
                            yield engine_id, piece
                            if piece.finish_reason is not None:
                                return
                    raise EngineError(f"engine {engine_id} ended a turn without saying so")
            except EngineError as e:
                failure = e
                logger.info("engine call failed engine=%s: %s", engine_id, e)
                if left is not request:  # it was getting on
                    deadline = self._clock() + self._patience
                if self._clock() >= deadline:
                    raise busy(f"the engines fail: {e}") from e


def _after(request: GenerateRequest, piece: Piece) -> GenerateRequest:
    """What another engine would be asked to go on with."""
    return replace(
        request,
        token_ids=request.token_ids + piece.token_ids,
        max_tokens=max(1, request.max_tokens - len(piece.token_ids)),
    )


async def pieces(client: Any, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
    """The turn as `client` gives it: piece by piece where it can."""
    stream = getattr(client, "stream", None)
    if stream is not None:
        async with aclosing(stream(request)) as found:
            async for piece in found:
                yield piece
        return
    result = await client.generate(request)
    yield Piece(
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        version_spans=result.version_spans,
        finish_reason=result.finish_reason,
    )


class Stepwise:
    """An engine in this process whose tokens depend on nothing but the context: asked for a few at a time."""

    def __init__(self, engine: Any, *, step: int = 1) -> None:
        """`engine`: a ScriptedEngine, or another whose `generate` is pure."""
        self._engine, self._step = engine, step

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One turn."""
        return await self._engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        """`step` tokens at a time."""
        left = request
        while True:
            some = min(self._step, left.max_tokens)
            result = await self._engine.generate(replace(left, max_tokens=some))
            last = result.finish_reason != "length" or some == left.max_tokens
            piece = Piece(
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                version_spans=result.version_spans,
                finish_reason=result.finish_reason if last else None,
            )
            yield piece
            if last:
                return
            left = _after(left, piece)

    async def close(self) -> None:
        """The engine belongs to who made it."""
