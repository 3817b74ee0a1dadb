"""The broker's time, as far as a worker can know it: groups close by append times, not by its own clock.

A record that was appended at broker time t and whose delivery is known at local time r proves that the broker
is at least t - r ahead; the largest such proof of the last minutes is used. So the estimate is late by one
delivery at most, and never early. Before the first delivery the worker's own clock has to do.
"""

from __future__ import annotations

BUCKET_MS = 60_000


class BrokerClock:
    """Learns from deliveries."""

    def __init__(self) -> None:
        self._bucket = 0
        self._ahead_ms: int | None = None
        self._before_ms: int | None = None
        """The largest proof of this minute, and of the one before with a delivery."""

    def note(self, *, appended_ms: int, now_ms: int) -> None:
        """A record appended at `appended_ms`, broker's time, is known to be delivered at `now_ms`, local time."""
        bucket, ahead = now_ms // BUCKET_MS, appended_ms - now_ms
        if bucket != self._bucket:
            self._bucket, self._before_ms, self._ahead_ms = bucket, self._ahead_ms, None
        self._ahead_ms = ahead if self._ahead_ms is None else max(self._ahead_ms, ahead)

    @property
    def ahead_ms(self) -> int:
        """The broker's clock minus the local one, in milliseconds, at least; 0 while nothing is known."""
        known = [ms for ms in (self._ahead_ms, self._before_ms) if ms is not None]
        return max(known, default=0)

    def at(self, now_ms: int) -> int:
        """The broker's time at local time `now_ms`, not early."""
        return now_ms + self.ahead_ms
