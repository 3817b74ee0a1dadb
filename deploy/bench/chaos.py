"""The whole local stack on three Kafka nodes with a monkey in it; afterwards the books must balance.

blows     roles and broker nodes are killed -9 or stopped for a while, the supervisor starts them again
settle    rollouts end; until every group has read everything and the trainer has trained what is admitted
proof     the audit of the log, every version made again from version 0, no process left
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schemas.config import Config
from ...schemas.config_file import load_config
from ...schemas.errors import ConfigError, HeadraceError
from ..audit import AuditResult
from ..audit_log import GroupLag, group_lags, read_weights, run_audit
from ..commands_audit import LEDGER_VARIABLE
from ..follow import Follower
from ..interrupts import Interrupts
from ..presets import ADDITION
from ..processes import children_stopped, signal_group
from ..restart_file import read_restarts
from ..run_dir import locked
from ..stack import Plan, Stack, python
from ..supervisor import RoleState
from .cluster import left_over, may_lose_one
from .monkey import Monkey
from .redo import Redone, redo_all

POLL_SECONDS = 0.1
START_SECONDS = 180.0
"""Until the first version is trained."""
STUCK_SECONDS = 180.0
"""Without any move while the run settles."""
QUIET_SECONDS = 3.0
"""Without a new version before the books are looked at."""
LEDGER = "acknowledged.txt"
NODES = 3
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is asked."""

    run_dir: Path
    """Empty or new."""
    seconds: float
    """Of blows, at most."""
    kills: int | None = None
    """Enough."""
    seed: int = 0
    kafka_home: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted configuration keys over those of the suite."""


@dataclass(slots=True)
class _Seen:
    """What happened meanwhile."""

    kills: Counter[str] = field(default_factory=Counter)
    freezes: int = 0
    longest_stall_s: float = 0.0
    """Longest time without a new version while blows fell."""
    problems: list[str] = field(default_factory=list)


def chaos(trial: Trial, say: Say) -> dict[str, Any]:
    """Run one; the figures, `passed` and `problems` among them. Raises HeadraceError where a role was given up."""
    run_dir = trial.run_dir.resolve()
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(f"{run_dir} is not empty: choose a new folder")
    plan = Plan(
        config=_config(trial, run_dir),
        tasks=list(ADDITION.tasks()),
        prepare=[
            *python("headrace.consumers.trainer.warmstart"),
            "addition",
            str(trial.seed),
            str(run_dir / "model"),
        ],
    )
    with (
        Interrupts() as interrupts,
        locked(run_dir),
        children_stopped(grace_s=10.0),
        _ledger(run_dir / LEDGER),
    ):
        stack = Stack(plan, tick=_once(say), hurry=interrupts.hurry)
        try:
            stack.start()
            found = _Run(stack, trial, say).go()
        finally:
            interrupts.closing()
            stack.stop()
    left = list(left_over(run_dir, besides=[os.getpid(), os.getppid()]))
    found["leaked_processes"] = len(left)
    found["problems"] += [f"still running: {line}" for line in left]
    found["passed"] = not found["problems"]
    return found


class _Run:
    """One run of a started stack."""

    def __init__(self, stack: Stack, trial: Trial, say: Say) -> None:
        self._stack, self._trial, self._say = stack, trial, say
        self._follower = Follower(stack.config)
        self._seen = _Seen()

    def go(self) -> dict[str, Any]:
        """Blows, settling, proof."""
        try:
            self._until(
                lambda: (self._version() or 0) >= 1, START_SECONDS, "the first version was not trained"
            )
            self._blows()
            self._say("the blows end")
            rollouts = [
                r.spec.name for r in self._stack.supervisor.roles if r.spec.name.startswith("rollout")
            ]
            self._stack.supervisor.stop_some(rollouts)
            self._until(
                lambda: bool(self._vulnerable()), STUCK_SECONDS, "the broker's nodes were not all in sync"
            )
            audit, lags = self._settle()
            self._stack.stop_roles()
        finally:
            self._follower.close()
        self._say("every version is made again")
        redone = redo_all(self._stack.config, read_weights(self._stack.config), self._say)
        return self._figures(audit, lags, redone)

    def _blows(self) -> None:
        started = moved = time.monotonic()
        monkey, version = Monkey(self._trial.seed, now=started), self._version()
        enough = self._trial.kills or 10**9
        while time.monotonic() - started < self._trial.seconds and self._seen.kills.total() < enough:
            self._look()
            now = time.monotonic()
            if self._version() != version:
                version, moved = self._version(), now
            self._seen.longest_stall_s = max(self._seen.longest_stall_s, now - moved)
            live = [r.spec.name for r in self._stack.supervisor.roles if _lives(r)]
            for blow in monkey.blows(now, live, self._vulnerable):
                self._strike(blow.kind, blow.name)
        for name in monkey.frozen:
            self._strike("thaw", name)

    def _strike(self, kind: str, name: str) -> None:
        role = next(r for r in self._stack.roles if r.spec.name == name)
        signal_group(role.process, SIGNALS[kind])
        self._seen.kills[name] += kind == "kill"
        self._seen.freezes += kind == "freeze"
        total = f"{self._seen.kills.total()} kills" if kind == "kill" else ""
        self._say(f"{kind} {name}  version {self._version()} {total}".rstrip())

    def _vulnerable(self) -> list[str]:
        """The broker's nodes, unless one is away already."""
        nodes = [r for r in self._stack.roles if r.spec.name.startswith("broker")]
        well = len(nodes) == NODES and all(_lives(r) for r in nodes)
        return [r.spec.name for r in nodes] if well and may_lose_one(self._stack.config.kafka, NODES) else []

    def _settle(self) -> tuple[AuditResult, list[GroupLag]]:
        audit, lags = self._still()
        rest = audit.waiting.get("trainer", 0)
        if rest and not self._seen.problems:
            # Less than a batch: one more step takes what there is, so that nothing is left on its way.
            self._say(f"a last step of {rest}")
            self._stack.supervisor.stop_some(["trainer"])
            self._stack.finish_with(
                "trainer-last",
                {"trainer.batch_size": rest, "trainer.steps": audit.versions + 1, "staleness.max_lag": 10**6},
            )
            self._until(
                lambda: self._stack.supervisor.finished("trainer-last"),
                STUCK_SECONDS,
                "the last step was not made",
            )
            audit, lags = self._books(), group_lags(self._stack.config)
        return audit, lags

    def _still(self) -> tuple[AuditResult, list[GroupLag]]:
        """Wait until the processors have read everything and the trainer has less than a batch before it."""
        state, moved = None, time.monotonic()
        while True:
            self._look()
            lags = group_lags(self._stack.config)
            now, before, state = time.monotonic(), state, (lags, self._version())
            if state != before:
                moved = now
                self._say("settling: " + ", ".join(f"{lag.topic} {lag.lag}" for lag in lags))
            streams_lag = sum(lag.lag for lag in lags[:2])
            if not streams_lag and now - moved > QUIET_SECONDS:
                audit = self._books()
                rest = audit.in_flight
                if rest == audit.waiting.get("trainer", 0) < self._stack.config.trainer.batch_size:
                    return audit, lags
            if now - moved > STUCK_SECONDS:
                self._seen.problems += [
                    f"{lag.group} is stuck in {lag.topic}: lag by partition {dict(lag.partitions)}"
                    for lag in lags
                    if lag.lag
                ]
                return self._books(), lags
            time.sleep(0.5)

    def _books(self) -> AuditResult:
        return run_audit(self._stack.config, ledger=self._stack.run_dir / LEDGER)

    def _until(self, done: Callable[[], bool], seconds: float, otherwise: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            self._look()
            if time.monotonic() > deadline:
                raise HeadraceError(
                    f"{otherwise} in {seconds:.0f} s; logs are in {self._stack.run_dir / 'logs'}"
                )

    def _look(self) -> None:
        self._follower.poll(POLL_SECONDS)
        self._stack.check()

    def _version(self) -> int | None:
        return self._follower.history.version

    def _figures(self, audit: AuditResult, lags: list[GroupLag], redone: Redone) -> dict[str, Any]:
        seen, stuck = self._seen, [p for p in self._seen.problems if " is stuck in " in p]
        problems = [*seen.problems, *audit.problems]
        problems += [
            f"{n} trajectories are still on the way to {stage}" for stage, n in audit.waiting.items()
        ]
        problems += [redone.problem] if redone.problem else []
        return {
            "seed": self._trial.seed,
            "kills": seen.kills.total(),
            "kills_by_role": dict(sorted(seen.kills.items())),
            "freezes": seen.freezes,
            "acknowledged": audit.acknowledged,
            "acknowledged_in_ledger": audit.ledger,
            "trained": audit.trained,
            "dropped": audit.dropped,
            "void": audit.void,
            "deadlettered": audit.deadlettered,
            "in_flight": audit.in_flight,
            "lost": audit.lost,
            "trained_twice": audit.trained_twice,
            "reasons": dict(sorted(audit.reasons.items())),
            "conflicting_repeats": audit.conflicts,
            "versions": audit.versions,
            "version_gaps": audit.version_gaps,
            "versions_redone": redone.versions,
            "hash_mismatches": redone.mismatches,
            "stuck_groups": len(stuck),
            "restarts": read_restarts(self._stack.run_dir),
            "longest_stall_s": round(seen.longest_stall_s, 1),
            "lags": {f"{lag.group} {lag.topic}": lag.lag for lag in lags},
            "run_dir": str(self._stack.run_dir),
            "problems": problems,
        }


@contextmanager
def _clients_quiet() -> Iterator[None]:
    """Nodes that are away are the point: this process's clients need not tell each failed connection."""
    clients = logging.getLogger("kafka")
    former = clients.level
    clients.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        clients.setLevel(former)


def _once(say: Say) -> Say:
    """`say` without the repeats of a phase that is told often."""
    last = [""]

    def tell(text: str) -> None:
        if text != last[0]:
            say(text)
        last[0] = text

    return tell


def _lives(role: Any) -> bool:
    return role.state is RoleState.RUNNING and role.process.poll() is None


@contextmanager
def _ledger(path: Path) -> Iterator[None]:
    """Producers of this process's children write their acknowledgements to `path`."""
    path.touch()
    former = os.environ.get(LEDGER_VARIABLE)
    os.environ[LEDGER_VARIABLE] = str(path)
    try:
        yield
    finally:
        if former is None:
            del os.environ[LEDGER_VARIABLE]
        else:
            os.environ[LEDGER_VARIABLE] = former


def _config(trial: Trial, run_dir: Path) -> Config:
    """The demo's single turn with the scripted engine, small enough that ten processes share two cores."""
    settings = {
        **ADDITION.settings,
        "run.namespace": "chaos",
        "run.dir": str(run_dir),
        "run.seed": trial.seed,
        "policy.model": str(run_dir / "model"),
        "kafka.broker": "kafka",
        "kafka.nodes": NODES,
        "kafka.kafka_home": str(trial.kafka_home) if trial.kafka_home is not None else None,
        "engine.kind": "scripted",
        "rollout.workers": 2,
        "rollout.concurrency": 32,
        "rollout.group_seconds": 20.0,
        "streams.workers": 2,
        "trainer.batch_size": 64,
        "trainer.checkpoint_every": 5,
        "trainer.anchor_every": 10,
        **trial.settings,
    }
    return load_config(overrides=settings)
