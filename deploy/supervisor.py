"""Starts roles as processes, restarts those that die, and stops all of them in the order of the flow.

`check()` is called from the owner's loop. Nothing outlives this process: a clean `stop()` ends every role, and
where there is no time for one (kill -9) the kernel kills them.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from ..schemas.errors import HeadraceError
from ..streams.metrics import RESTARTS_VARIABLE
from .processes import signal_group, spawn, tail
from .restarts import CONFIG, FENCED, OK, RestartRule, RestartState

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02


class RoleFailedError(HeadraceError):
    """A role ended and will not be started again."""


class RoleState(StrEnum):
    """Where a supervised role is."""

    RUNNING = "running"
    WAITING = "waiting"
    """Died; its restart is due."""
    FINISHED = "finished"
    """Ended with status 0, as it may."""
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One process to run."""

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] | None = None
    stop_order: int = 0
    """Lower stops earlier; equal ones stop together."""
    grace_s: float = 10.0
    """Between SIGTERM and SIGKILL."""
    death_signal: signal.Signals = signal.SIGKILL
    """What it gets when this process dies."""
    finishes: bool = False
    """True when it may end with status 0 by itself; anything else that ends is restarted."""


@dataclass(slots=True)
class Role:
    """A role and its current process."""

    spec: RoleSpec
    restarts: RestartState
    process: subprocess.Popen[bytes]
    started: float
    """Monotonic seconds of the current process."""
    state: RoleState = RoleState.RUNNING
    due: float = field(default=0.0)
    """Monotonic seconds of the restart, while WAITING."""
    killed: bool = False
    """True once it was killed because it did not stop."""


class Supervisor:
    """A set of roles."""

    def __init__(
        self,
        *,
        rule: RestartRule | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_restart: Callable[[Mapping[str, Mapping[str, int]]], object] = lambda counts: None,
    ) -> None:
        """`on_restart` is told the restarts of every role that had any, by cause, after each."""
        self._on_restart = on_restart
        self._rule = rule or RestartRule()
        self._clock = clock
        self._roles: dict[str, Role] = {}
        self._stopping = False

    @property
    def roles(self) -> list[Role]:
        """In the order in which they were started."""
        return list(self._roles.values())

    def start(self, spec: RoleSpec) -> None:
        """Start a role."""
        self._roles[spec.name] = Role(spec, RestartState(self._rule), _spawn(spec, ""), self._clock())

    def adopt(self, spec: RoleSpec, process: subprocess.Popen[bytes]) -> None:
        """Look after a process that was started with `spec` by someone else."""
        self._roles[spec.name] = Role(spec, RestartState(self._rule), process, self._clock())

    def finished(self, name: str) -> bool:
        """True once a role that may end has ended well."""
        return self._roles[name].state is RoleState.FINISHED

    def check(self) -> None:
        """Look at every role once: restart what died, and raise RoleFailedError for what keeps dying."""
        now = self._clock()
        for role in self._roles.values():
            if role.state is RoleState.WAITING and now >= role.due:
                role.process, role.started = _spawn(role.spec, _causes_text(role)), now
                role.state = RoleState.RUNNING
            elif role.state is RoleState.RUNNING and (status := role.process.poll()) is not None:
                self._ended(role, status, now)

    def _ended(self, role: Role, status: int, now: float) -> None:
        signal_group(role.process, signal.SIGKILL)
        if status == OK and role.spec.finishes:
            role.state = RoleState.FINISHED
            return
        delay = role.restarts.delay_after(status, now=now, lived_s=now - role.started)
        if delay is None:
            role.state = RoleState.FAILED
            raise RoleFailedError(_explain(role, status))
        logger.warning(
            "%s ended (%s); restart %d in %.1f s, log=%s, its last line: %s",
            role.spec.name,
            describe_status(status),
            role.restarts.total,
            delay,
            role.spec.log,
            _last_line(role.spec.log),
        )
        role.state, role.due = RoleState.WAITING, now + delay
        self._on_restart(
            {
                name: {cause.value: n for cause, n in r.restarts.causes.items()}
                for name, r in self._roles.items()
                if r.restarts.total
            }
        )

    def stop(self, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop all roles, earlier ones first; `hurry()` turning true kills whatever is left. Idempotent."""
        for order in sorted({role.spec.stop_order for role in self._roles.values()}):
            self._stop_together([r for r in self._roles.values() if r.spec.stop_order == order], hurry)

    def stop_some(self, names: Sequence[str]) -> None:
        """Stop these roles together, and start them no more."""
        self._stop_together([self._roles[name] for name in names], lambda: False)

    def _stop_together(self, roles: Sequence[Role], hurry: Callable[[], bool]) -> None:
        live = [role for role in roles if role.process.poll() is None]
        for role in live:
            role.process.send_signal(signal.SIGTERM)
        asked = self._clock()
        while live := [role for role in live if role.process.poll() is None]:
            for role in live:
                late = self._clock() > asked + role.spec.grace_s
                if late and not role.killed:
                    logger.warning("%s did not stop in %.0f s: killed", role.spec.name, role.spec.grace_s)
                if (late or hurry()) and not role.killed:
                    role.killed = True
                    signal_group(role.process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        for role in roles:
            # A role that ended may have left children in its group.
            signal_group(role.process, signal.SIGKILL)
            if role.state in (RoleState.RUNNING, RoleState.WAITING):
                done = role.spec.finishes and role.process.returncode == OK
                role.state = RoleState.FINISHED if done else RoleState.STOPPED


def _spawn(spec: RoleSpec, restarts: str) -> subprocess.Popen[bytes]:
    env = dict(os.environ if spec.env is None else spec.env)
    env |= {RESTARTS_VARIABLE: restarts}
    return spawn(spec.argv, log=spec.log, env=env, death_signal=spec.death_signal)


def _causes_text(role: Role) -> str:
    return ",".join(f"{cause}={n}" for cause, n in role.restarts.causes.items())


def _last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    return next((line.strip() for line in reversed(tail(log).splitlines()) if line.strip()), "")


def describe_status(status: int) -> str:
    """`status 1`, or `killed by SIGKILL`."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _explain(role: Role, status: int) -> str:
    name = role.spec.name
    if status == CONFIG:
        why = f"{name} cannot run with this configuration"
    elif status == FENCED:
        why = f"{name} was fenced: another one works for the same policy"
    else:
        why = f"{name} ended {role.restarts.total + 1} times, the last with {describe_status(status)}"
    return f"{why}. {role.spec.log} ends with\n{tail(role.spec.log)}"
