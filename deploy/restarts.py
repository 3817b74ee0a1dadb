"""When a role that ended is started again: a rule (frozen) and its state, with the time passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

OK = 0
CONFIG = 2
FENCED = 3
WATCHDOG = 70
"""Exit statuses of roles. CONFIG and FENCED cannot be mended by a restart; WATCHDOG asks for one at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """At most `limit` restarts within `window_s`, the n-th after `first_delay_s * 2**(n-1)`, capped."""

    limit: int = 5
    window_s: float = 120.0
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0


@dataclass(slots=True)
class RestartState:
    """The restarts of one role."""

    rule: RestartRule
    total: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def delay_after(self, status: int, *, now: float) -> float | None:
        """Seconds to wait before the restart of a role that ended with `status`; None: give up."""
        while self._recent and self._recent[0] <= now - self.rule.window_s:
            self._recent.popleft()
        if status in (CONFIG, FENCED) or len(self._recent) >= self.rule.limit:
            return None
        self._recent.append(now)
        self.total += 1
        if status == WATCHDOG:
            return 0.0
        return min(self.rule.max_delay_s, self.rule.first_delay_s * 2 ** (len(self._recent) - 1))
