"""Now and then, all live weights against the subscriber's copy, while tokens flow: memory may change by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ...schemas.errors import HeadraceError, WeightUpdateError
from .follower import Follower
from .protocol import Engine, ReadsBack
from .replica import Replica

logger = logging.getLogger(__name__)

AUDIT_BYTES = 1 << 26
"""Looked at in one go, so that a new version never waits for long and an engine need not be handed the whole model."""


class Audit:
    """Looks at an engine that can be looked at; the others are hashed in full in every pause anyway."""

    def __init__(
        self,
        engine: Engine,
        replica: Replica,
        follower: Follower,
        *,
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`seconds`: between the beginnings of two rounds."""
        self._engine, self._replica, self._follower = engine, replica, follower
        self._seconds, self._clock = seconds, clock
        self._began = clock()
        self._unseen: list[str] = []
        """Tensors that the round which is under way has still to look at."""

    def look(self) -> WeightUpdateError | None:
        """Look at the next part, where it is time to; returns what is wrong with it.

        Only while the replica holds what is live.
        """
        follower = self._follower
        if follower.needs_anchor or not isinstance(self._engine, ReadsBack):
            return None
        if not self._unseen:
            if self._clock() - self._began < self._seconds:
                return None
            self._began, self._unseen = self._clock(), self._replica.names
        assert follower.weights_hash is not None
        names: list[str] = []
        while self._unseen and self._replica.size(names) < AUDIT_BYTES:
            names.append(self._unseen.pop())
        try:
            self._engine.verify(self._replica.some(names, follower.version, follower.weights_hash))
        except WeightUpdateError as e:
            return e
        except HeadraceError as e:
            logger.warning("the live weights could not be looked at: %s", e)
        return None
