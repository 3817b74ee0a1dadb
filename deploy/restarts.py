"""When a role that ended is started again: a rule (frozen) and its state, with the time passed in."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

OK = 0
CONFIG = 2
FENCED = 3
WATCHDOG = 70
"""Exit statuses of roles. CONFIG and FENCED cannot be mended by a restart; WATCHDOG asks for one at once."""


class RestartCause(StrEnum):
    """Why a role was started again; also a label of headrace_role_restarts."""

    STALLED = "stalled"
    """It ended itself because nothing moved."""
    KILLED = "killed"
    """By a signal that is not of its own making."""
    CRASHED = "crashed"


def cause_of(status: int) -> RestartCause:
    """From an exit status; negative is a signal."""
    if status == WATCHDOG:
        return RestartCause.STALLED
    return RestartCause.KILLED if status < 0 else RestartCause.CRASHED


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """At most `limit` restarts in a row, the n-th after `first_delay_s * 2**(n-1)`, capped.

    A process that lived `lasting_s` starts a new row: how slowly a machine gets a role to its failure must not
    matter. `window_limit` restarts within `window_s` are too many all the same. A process that was killed from
    outside did not fail by itself: `killed_lasting_s` starts a new row, and it is not counted in the window.
    """

    limit: int = 5
    lasting_s: float = 60.0
    killed_lasting_s: float = 2.0
    window_limit: int = 30
    window_s: float = 3600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 10.0


@dataclass(slots=True)
class RestartState:
    """The restarts of one role."""

    rule: RestartRule
    causes: Counter[RestartCause] = field(default_factory=Counter)
    _in_a_row: int = 0
    _recent: deque[float] = field(default_factory=deque)

    @property
    def total(self) -> int:
        """Restarts of any cause."""
        return self.causes.total()

    def delay_after(self, status: int, *, now: float, lived_s: float) -> float | None:
        """Seconds to wait before the restart of a role that ended with `status` after `lived_s`; None: give up."""
        cause = cause_of(status)
        killed = cause is RestartCause.KILLED
        if lived_s >= (self.rule.killed_lasting_s if killed else self.rule.lasting_s):
            self._in_a_row = 0
        while self._recent and self._recent[0] <= now - self.rule.window_s:
            self._recent.popleft()
        spent = self._in_a_row >= self.rule.limit or len(self._recent) >= self.rule.window_limit
        if status in (CONFIG, FENCED) or spent:
            return None
        self._in_a_row += 1
        if not killed:
            self._recent.append(now)
        self.causes[cause] += 1
        if status == WATCHDOG:
            return 0.0
        return min(self.rule.max_delay_s, self.rule.first_delay_s * 2 ** (self._in_a_row - 1))
