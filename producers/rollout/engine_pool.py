"""Which engine takes a turn: the least loaded one that can, with bounded retries on another or again.

Engines are known by their own records on the `engines` topic. One that fails is left alone for a while; a
poisoned one until it reports again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from ...schemas.engine import EngineState, EngineStatus
from ...schemas.errors import EngineError, EnginePoisonedError
from ..engines.protocol import GenerateRequest, GenerateResult

logger = logging.getLogger(__name__)

_UNABLE = (EngineState.POISONED, EngineState.STOPPED)


class EngineClient(Protocol):
    """Calls one engine."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """One turn. Raises EngineError."""

    async def close(self) -> None:
        """Release the connection."""


@dataclass(frozen=True, slots=True)
class RetryRule:
    """How often one turn is tried, and the pauses in between (seconds)."""

    attempts: int = 10
    first_pause: float = 0.1
    longest_pause: float = 3.0

    def pause(self, failures: int) -> float:
        """After the `failures`-th failure."""
        return min(self.longest_pause, self.first_pause * 2 ** (failures - 1))


@dataclass(slots=True)
class _Known:
    status: EngineStatus
    client: EngineClient
    in_flight: int = 0
    failures: int = 0
    shunned_until: float = 0.0


class EnginePool:
    """The engines of one policy. Lives on one event loop."""

    def __init__(
        self,
        policy_id: str,
        connect: Callable[[str], EngineClient],
        *,
        rule: RetryRule = RetryRule(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect`: url -> client."""
        self._policy_id = policy_id
        self._connect = connect
        self._rule = rule
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._retired: list[EngineClient] = []
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """True when some engine may be asked now."""
        return self._pick(None) is not None

    @property
    def failing(self) -> bool:
        """True while no engine's last call went well: then only a group at a time finds out whether one does again."""
        return all(k.failures for k in self._known.values())

    def update(self, status: EngineStatus) -> None:
        """An engine's own record."""
        if status.policy_id != self._policy_id or status.url is None:
            return
        known = self._known.get(status.engine_id)
        if known is None or known.status.url != status.url:
            if known is not None:
                self._retired.append(known.client)
            self._known[status.engine_id] = _Known(status, self._connect(status.url))
        else:
            known.status = status
            known.shunned_until = 0.0
        self._changed.set()

    def remove(self, engine_id: str) -> None:
        """A tombstone."""
        known = self._known.pop(engine_id, None)
        if known is not None:
            self._retired.append(known.client)

    async def generate(
        self, request: GenerateRequest, prefer: str | None = None
    ) -> tuple[str, GenerateResult]:
        """(engine_id, result); `prefer`: the engine that holds this rollout's prefix. EngineError at last."""
        failure: EngineError = EngineError("no engine has announced itself")
        for attempt in range(1, self._rule.attempts + 1):
            engine_id = self._pick(prefer)
            if engine_id is not None:
                try:
                    return engine_id, await self._ask(engine_id, request)
                except EngineError as e:
                    failure = e
                    logger.info("engine call failed engine=%s attempt=%d: %s", engine_id, attempt, e)
            if attempt < self._rule.attempts:
                await self._pause(self._rule.pause(attempt))
        raise failure

    @property
    def version(self) -> int:
        """The newest policy version that an engine has reported; -1 without one."""
        return max((k.status.version for k in self._known.values()), default=-1)

    def choose(self, prefer: str | None = None) -> str | None:
        """The engine to ask now: `prefer` if it can, else the least loaded; None while none can."""
        return self._pick(prefer)

    @contextmanager
    def asking(self, engine_id: str) -> Iterator[EngineClient]:
        """The client of a chosen engine; an EngineError inside the block makes the pool leave it alone for a while."""
        known = self._known[engine_id]
        known.in_flight += 1
        try:
            yield known.client
        except EngineError as e:
            known.failures += 1
            poisoned = isinstance(e, EnginePoisonedError)
            pause = 10 * self._rule.longest_pause if poisoned else self._rule.pause(known.failures)
            known.shunned_until = self._clock() + pause
            raise
        finally:
            known.in_flight -= 1
        known.failures = 0

    async def wait(self, seconds: float) -> None:
        """`seconds`, or until an engine reports."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _ask(self, engine_id: str, request: GenerateRequest) -> GenerateResult:
        with self.asking(engine_id) as client:
            return await client.generate(request)

    def _pick(self, prefer: str | None) -> str | None:
        now = self._clock()
        able = {
            i: k
            for i, k in self._known.items()
            if k.status.state not in _UNABLE
            and not k.status.held
            and k.status.version >= 0
            and k.shunned_until <= now
        }
        if prefer in able:
            return prefer
        return min(able, key=lambda i: able[i].in_flight, default=None)

    async def _pause(self, seconds: float) -> None:
        """`seconds`, or less where an engine reports meanwhile and none could be asked before."""
        if self.ready:
            await asyncio.sleep(seconds)
            return
        await self.wait(seconds)

    async def close(self) -> None:
        """Close every connection."""
        for client in [*self._retired, *(k.client for k in self._known.values())]:
            await client.close()
