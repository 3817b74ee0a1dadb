"""Runs a stack to its end: shows what happens, follows the log, stops everything, sums up.

`headrace demo` and `headrace up` differ in the plan and in when they are done.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schemas.errors import HeadraceError
from .follow import Follower
from .history import History
from .interrupts import Interrupted, Interrupts
from .processes import children_stopped
from .run_dir import locked
from .screen import Screen
from .stack import Plan, Stack
from .view import phase_text, summary_table
from .voids import hopeless, voids_line

PLOT = "plot.png"
POLL_SECONDS = 0.1
LEFT_SECONDS = 10.0
"""For processes that nobody got hold of before an interruption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """When a run is done. Without a limit it goes on until it is stopped."""

    reward: float | None = None
    """Exponential mean of the reward."""
    steps: int | None = None
    seconds: float | None = None
    steps_suffice: bool = True
    """False: ending by `steps` or `seconds` without `reward` is a failure."""

    def reached(self, history: History, *, seconds: float, trained: bool) -> str | None:
        """Why the run is over, or None."""
        best = history.best_reward
        if self.reward is not None and best is not None and best >= self.reward:
            return f"the reward reached {best:.3f}"
        if trained or (self.steps is not None and (history.version or 0) >= self.steps):
            return f"{history.version} steps are done"
        if self.seconds is not None and seconds > self.seconds:
            return f"the time limit of {self.seconds:.0f} s has passed"
        return None

    def missed(self, history: History) -> str | None:
        """Why a run that ended did not do what it was for, or None."""
        if not history.steps:
            return "no step was trained"
        # Steps that were made while the run was being stopped may have taken the mean below the goal again.
        best = history.best_reward or 0.0
        if self.reward is not None and not self.steps_suffice and best < self.reward:
            return f"the reward came to {best:.3f}, not to {self.reward}"
        return None


class RunFailedError(HeadraceError):
    """The run ended without having done what it was for."""


def run(
    plan: Plan,
    goal: Goal,
    *,
    title: str,
    task: str,
    quiet: bool,
    about: str = "",
    started: float | None = None,
) -> dict[str, Any]:
    """Run `plan` until `goal`; returns the summary, which also goes to summary.json, with plot.png beside it.

    `quiet` keeps standard output free (progress goes to standard error). Ctrl-C ends the run: Interrupted, after
    everything has been stopped. Raises RoleFailedError, BrokerError, ConfigError, or RunFailedError.
    """
    started = time.monotonic() if started is None else started
    started_ms = int((time.time() - (time.monotonic() - started)) * 1000)
    run_dir = plan.config.run.dir.resolve()
    with (
        Interrupts() as interrupts,
        locked(run_dir),
        children_stopped(grace_s=LEFT_SECONDS),
        Screen(title, about, started=started, quiet=quiet) as screen,
    ):
        stack = Stack(plan, tick=screen.phase, hurry=interrupts.hurry)
        screen.roles = lambda: stack.roles
        screen.tell(f"the run is in {run_dir}; logs in {run_dir / 'logs'}")
        follower: Follower | None = None
        try:
            stack.start()
            follower = Follower(stack.config)
            screen.history = follower.history
            why = _follow(stack, follower, goal, screen, started, started_ms)
            seconds = time.monotonic() - started
            interrupts.closing()
            screen.phase(f"stopping: {why}")
            stack.stop_roles()
            follower.catch_up()
        except Interrupted:
            screen.phase("stopping: interrupted")
            raise
        finally:
            interrupts.closing()
            if follower is not None:
                follower.close()
            stack.stop()
        history = follower.history
        summary = history.summary(
            task=task, seed=plan.config.run.seed, seconds=seconds, started_ms=started_ms
        ) | {"ended": why, "run_dir": str(run_dir)}
        if history.steps:
            from .plot import draw

            screen.phase("drawing the plot")
            draw(history, run_dir / PLOT, title=title)
            summary["plot"] = str(run_dir / PLOT)
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    missed = goal.missed(history)
    if missed is not None:
        raise RunFailedError(f"{why}, but {missed}; logs are in {run_dir / 'logs'}")
    return summary


def _follow(
    stack: Stack, follower: Follower, goal: Goal, screen: Screen, started: float, started_ms: int
) -> str:
    """Until the goal is reached; returns why the run is over. RunFailedError when it never will be."""
    history, logs, batch_size = follower.history, stack.run_dir / "logs", stack.config.trainer.batch_size
    warned = False
    reached: Callable[[], str | None] = lambda: goal.reached(  # noqa: E731
        history, seconds=time.monotonic() - started, trained=stack.trained
    )
    while True:
        grew = follower.poll(POLL_SECONDS)
        stack.check()
        if history.voids and not warned:
            warned = True
            screen.tell(voids_line(history, logs))
        phase = phase_text(history, batch_size=batch_size, since_ms=started_ms)
        if history.trained_since(started_ms):
            screen.phase(phase)
        else:
            screen.sampling(phase)
        screen.refresh(grew=grew)
        lost = hopeless(history, logs, batch_size=batch_size, since_ms=started_ms)
        if lost is not None:
            raise RunFailedError(lost)
        why = reached()
        if why is not None:
            return why


def show(summary: dict[str, Any], *, quiet: bool) -> None:
    """The end of a run for people."""
    from rich.console import Console

    Console(file=sys.stderr if quiet else sys.stdout).print(summary_table(summary))


def go_on(command: Sequence[str], *, steps_done: bool) -> str:
    """How to go on with an ended `headrace up`."""
    more = " with more --steps" if steps_done else ""
    return f"`headrace {shlex.join(command)}`{more} goes on from here"


def farewell(run_dir: Path, command: Sequence[str]) -> str:
    """What an interrupted `headrace up` leaves: where the run lies, and how to go on with it."""
    lines = [f"the run is in {run_dir}"]
    if (run_dir / PLOT).exists():
        lines.append(f"its plot is {run_dir / PLOT}")
    return "\n".join([*lines, go_on(command, steps_done=False)])
