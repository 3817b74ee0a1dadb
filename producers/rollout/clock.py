"""How far this machine's clock is from the broker's: a wrong one would make every score late, in silence.

The trajectories topic carries append times, so each acknowledgement brackets the broker's clock between two
readings of our own. No group is opened while the difference is too large, but for a probe now and then (its
deadline is corrected by the difference), since only a record can tell that the clock is right again.
"""

from __future__ import annotations

MAX_SKEW_MS = 5_000
PROBE_EVERY_MS = 30_000


def clock_skew_ms(*, sent_ms: int, acked_ms: int, append_ms: int) -> int:
    """Own clock minus the broker's, as far as one round trip proves it; 0 when it proves nothing."""
    if append_ms < sent_ms:
        return sent_ms - append_ms
    return min(0, acked_ms - append_ms)


class ClockCheck:
    """Whether groups may be opened, as far as the clock is concerned."""

    def __init__(self) -> None:
        self.skew_ms: int | None = None
        """Of the last acknowledgement; None before the first."""
        self._probe_at_ms = 0

    @property
    def wrong(self) -> bool:
        """True while the clocks are too far apart."""
        return self.skew_ms is not None and abs(self.skew_ms) > MAX_SKEW_MS

    def acknowledged(self, *, sent_ms: int, acked_ms: int, append_ms: int) -> bool:
        """One acknowledgement; True when the answer to `wrong` changes by it."""
        before = self.wrong
        self.skew_ms = clock_skew_ms(sent_ms=sent_ms, acked_ms=acked_ms, append_ms=append_ms)
        if self.wrong and not before:
            self._probe_at_ms = acked_ms + PROBE_EVERY_MS
        return self.wrong != before

    def may_open(self, now_ms: int, *, running: int) -> bool:
        """True when a group may be opened now; `running`: rollouts in flight."""
        if self.skew_ms is None:
            return running == 0
        if not self.wrong:
            return True
        if running or now_ms < self._probe_at_ms:
            return False
        self._probe_at_ms = now_ms + PROBE_EVERY_MS
        return True

    def deadline_ms(self, now_ms: int, group_ms: int) -> int:
        """`group_ms` from now, on the broker's clock."""
        return now_ms - (self.skew_ms or 0) + group_ms
