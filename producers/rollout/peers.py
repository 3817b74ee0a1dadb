"""The other rollout workers of the policy: who is alive, and what they have under way.

Each worker announces itself on the `workers` topic when its count changes and every HEARTBEAT_SECONDS; one that has
not been heard of for SESSION_SECONDS is dead, and its share is free. Time is this worker's own, from when it read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...schemas.worker import WorkerStatus

HEARTBEAT_SECONDS = 2.0
CHANGE_SECONDS = 0.1
"""Least time between two announcements."""
SESSION_SECONDS = 10.0


class Peers:
    """What the others have told, and when this worker must tell."""

    def __init__(self, worker_id: str, policy_id: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._worker_id, self._policy_id, self._now = worker_id, policy_id, now
        self._heard: dict[str, tuple[float, int]] = {}
        """Worker id -> when it was heard of, its outstanding rollouts."""
        self._told: tuple[float, int] | None = None

    def update(self, status: WorkerStatus) -> None:
        """An announcement; this worker's own and those of other policies are left out."""
        if status.policy_id == self._policy_id and status.worker_id != self._worker_id:
            self._heard[status.worker_id] = (self._now(), status.outstanding)

    def remove(self, worker_id: str) -> None:
        """It has ended."""
        self._heard.pop(worker_id, None)

    @property
    def others(self) -> list[int]:
        """The outstanding rollouts of each other worker that is alive."""
        oldest = self._now() - SESSION_SECONDS
        self._heard = {w: heard for w, heard in self._heard.items() if heard[0] >= oldest}
        return [outstanding for _, outstanding in self._heard.values()]

    def announcement(self, outstanding: int, *, at_ms: int) -> WorkerStatus | None:
        """What to tell the others now, if anything is due."""
        if self._told is not None:
            since = self._now() - self._told[0]
            if since < (HEARTBEAT_SECONDS if outstanding == self._told[1] else CHANGE_SECONDS):
                return None
        self._told = (self._now(), outstanding)
        return WorkerStatus(
            worker_id=self._worker_id, policy_id=self._policy_id, outstanding=outstanding, at_ms=at_ms
        )
