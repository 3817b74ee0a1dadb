"""What an engine tells of itself: its state, its last update, how far it is behind, and why it is not further."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...schemas.engine import EngineState, EngineStatus
from ...streams import metrics
from .follower import Follower
from .pauses import Pauses
from .protocol import Engine

logger = logging.getLogger(__name__)

Publish = Callable[[EngineStatus], None]


class Report:
    """The state and figures of one engine. Written by the subscriber's thread; `status` may be read from others."""

    def __init__(
        self,
        engine: Engine,
        follower: Follower,
        pauses: Pauses,
        *,
        engine_id: str,
        policy_id: str,
        url: str | None,
        publish: Publish,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`publish` is told of every change of state outside a pause. `wall`: Unix seconds."""
        self._engine, self._follower, self._pauses = engine, follower, pauses
        self._engine_id, self._policy_id, self._url = engine_id, policy_id, url
        self._publish, self._wall = publish, wall
        self._held = False
        self.state = EngineState.IDLE
        self.poisoned = False
        self.updates = 0
        self.stage_s: float | None = None
        self.apply_s: float | None = None
        self.pause_s: float | None = None
        """Seconds in which the last update kept tokens from flowing; None: it needed no pause."""
        self.paused: bool | None = None
        self.reason: str | None = None

    def status(self) -> EngineStatus:
        """As of now."""
        return EngineStatus(
            engine_id=self._engine_id,
            policy_id=self._policy_id,
            state=self.state,
            version=self._follower.version,
            weights_hash=None if self.poisoned else self._follower.weights_hash,
            latest_version=self._follower.latest,
            updates=self.updates,
            pause_ms=_ms(self.pause_s),
            apply_ms=_ms(self.apply_s),
            stage_ms=_ms(self.stage_s),
            running=self._engine.running,
            generated_tokens=self._engine.generated_tokens,
            url=self._url,
            reason=self.reason,
            at_ms=int(self._wall() * 1000),
            paused=self.paused,
            held=self._pauses.held,
        )

    def announce(self) -> None:
        """Publish the status, changed or not."""
        self._held = self._pauses.held
        metrics.engine_running.set(self._engine.running)
        self._publish(self.status())

    def announce_hold(self) -> None:
        """Publish where an operator has begun or ended a pause since the last time."""
        if self._held != self._pauses.held:
            self.announce()

    def enter(self, state: EngineState) -> None:
        """A new state; of a poisoned engine that is healing, the same one."""
        # Whoever looks for an engine to ask must see that this one refuses, whatever it does about it meanwhile.
        healing = self.poisoned and state is not EngineState.STOPPED
        self.state = EngineState.POISONED if healing else state
        self.announce()

    def applied(self, *, paused: bool, pause_s: float, apply_s: float | None) -> None:
        """The follower's newest live version is in the weights."""
        self.paused, self.pause_s, self.apply_s = paused, pause_s if paused else None, apply_s
        self.poisoned = False
        self.updates += 1
        if self._follower.version == self._follower.latest:
            self.reason = None
        metrics.engine_updates.labels(result="applied").inc()
        metrics.engine_version.set(self._follower.version)
        metrics.engine_poisoned.set(0)
        if paused:
            metrics.engine_pause_seconds.observe(pause_s)
        self.enter(EngineState.IDLE)
        logger.info(
            "weights applied version=%d behind=%d stage_ms=%.1f pause_ms=%.1f apply_ms=%.1f in_flight=%d",
            self._follower.version,
            self._follower.latest - self._follower.version,
            _ms(self.stage_s) or 0.0,
            _ms(self.pause_s) or 0.0,
            _ms(self.apply_s) or 0.0,
            self._engine.running,
        )

    def refused(self, reason: str) -> None:
        """A blob was not used; the engine is as it was."""
        metrics.engine_updates.labels(result="refused").inc()
        self.reason = reason
        logger.warning("%s", reason)

    def failed(self, reason: str) -> None:
        """The engine did not take an update."""
        metrics.engine_updates.labels(result="failed" if self.poisoned else "refused").inc()
        metrics.engine_poisoned.set(int(self.poisoned))
        self.reason = reason
        logger.error("%s", reason)
        self.enter(EngineState.IDLE)

    def wrong(self, reason: str) -> None:
        """Something is wrong with the topic; told once."""
        if reason not in (self.reason or ""):
            logger.error("%s", reason)
            self.reason = reason
            self.announce()

    def stuck(self, reason: str) -> None:
        """There is no way on; told once, behind what led to it."""
        if not (self.reason or "").endswith(reason):
            logger.warning("%s", reason)
            self.reason = reason if self.reason is None else f"{self.reason}; {reason}"
            self.announce()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000.0
