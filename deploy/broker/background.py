"""`headrace broker start|stop|status`: a broker that outlives the command, and its nodes by process id.

A node that died is started again with the same command by the next `start`; after a `stop` the addresses stay.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError, ConfigError
from ..processes import spawn, tail
from . import apache, class_archive, embedded
from .background_state import NodeState, State, locked, read_state, write_state
from .choice import choose
from .launcher import RESTART_SECONDS, start_broker
from .limits import LIMITS, BrokerKind
from .pids import bytes_on_disk, kill_group, process_start

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node at this moment."""

    name: str
    address: str
    up: bool
    pid: int | None
    uptime_s: float | None
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A broker in the background at this moment."""

    running: bool
    """More than half of its nodes are up."""
    kind: BrokerKind | None
    """None: none was ever started in this folder."""
    title: str
    bootstrap: str | None
    data: Path
    bytes_on_disk: int
    uptime_s: float | None
    """Of the node that runs longest."""
    nodes: tuple[NodeStatus, ...]
    settings: dict[str, str]
    """What clients need beside the address."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"data": str(self.data)}


def start(
    folder: Path, config: KafkaConfig, *, nodes: int | None, port: int | None
) -> tuple[Status, list[str]]:
    """Have a broker in `folder` with all its nodes; returns what was started, by name (none: all ran already).

    ConfigError where `folder` holds one of another kind or number of nodes, or on another port, and what
    `start_broker` raises.
    """
    folder = folder.absolute()
    with locked(folder):
        before = read_state(folder)
        if before is not None:
            _check_same(folder, before, config, nodes, port)
            if any(node.runs for node in before.nodes):
                return _revive(folder, before)
        chosen = choose(config.model_copy(update={"broker": before.kind}) if before is not None else config)
        count = nodes or (len(before.nodes) if before is not None else 1)
        wanted: int | list[int] | None = port
        if port is None and before is not None:
            wanted = before.ports
        started = start_broker(
            chosen.kind, folder / chosen.kind, chosen.home, port=wanted, nodes=count, outlives=True
        )
        now = time.time()
        states = [
            NodeState(
                name=node.name,
                pid=node.process.pid,
                started=process_start(node.process.pid) or "",
                started_at=now,
                address=address,
                command=node.command,
                log=str(node.log),
            )
            for node, address in zip(started.nodes, started.bootstrap.split(","), strict=True)
        ]
        write_state(folder, State(kind=started.kind, nodes=tuple(states)))
        return status(folder), [node.name for node in states]


def _check_same(
    folder: Path, before: State, config: KafkaConfig, nodes: int | None, port: int | None
) -> None:
    other = "give another folder with --data"
    if config.broker not in ("auto", before.kind):
        raise ConfigError(f"{folder} holds {LIMITS[before.kind].title}, not the {config.broker} one: {other}")
    if nodes is not None and nodes != len(before.nodes):
        raise ConfigError(f"{folder} holds a broker of {len(before.nodes)} node(s), not of {nodes}: {other}")
    if port is not None and port != before.ports[0] and any(node.runs for node in before.nodes):
        raise ConfigError(
            f"the broker in {folder} runs on port {before.ports[0]}, not {port}: stop it first "
            f"(`headrace broker stop`), or {other}"
        )


def _revive(folder: Path, before: State) -> tuple[Status, list[str]]:
    """Some node runs: start those that do not, on their addresses."""
    dead = [node for node in before.nodes if not node.runs]
    nodes = list(before.nodes)
    for n, node in enumerate(nodes):
        if node.runs:
            continue
        process = spawn(node.command, log=Path(node.log), death_signal=None)
        nodes[n] = replace(
            node, pid=process.pid, started=process_start(process.pid) or "", started_at=time.time()
        )
        # At once: an interruption must not lose sight of it.
        write_state(folder, replace(before, nodes=tuple(nodes)))
    state = replace(before, nodes=tuple(nodes))

    def usable() -> bool:
        if state.kind == "embedded":
            return embedded.answers("127.0.0.1", state.ports[0])
        return apache.usable(state.bootstrap, len(state.nodes))

    if (
        not _wait(lambda: usable() or not all(node.runs for node in state.nodes), RESTART_SECONDS)
        or not usable()
    ):
        down = next((node for node in state.nodes if not node.up), state.nodes[0])
        raise BrokerError(f"{down.name} did not come back. {down.log} ends with\n{tail(Path(down.log))}")
    return status(folder), [node.name for node in dead]


def stop(folder: Path) -> list[str]:
    """Clean stop; returns the nodes that ran. What was acknowledged is on disk afterwards."""
    folder = folder.absolute()
    if read_state(folder) is None:
        return []
    with locked(folder):
        state = read_state(folder)
        assert state is not None
        running = [node for node in state.nodes if node.runs]
        for node in reversed(running):
            os.kill(node.pid, signal.SIGTERM)
        grace = embedded.STOP_SECONDS if state.kind == "embedded" else apache.STOP_SECONDS
        if not _wait(lambda: not any(node.runs for node in running), grace):
            for node in running:
                if node.runs:
                    kill_group(node.pid)
            _wait(lambda: not any(node.runs for node in running), grace)
        data = folder / state.kind
        if state.kind == "kafka":
            for part in (data, *data.glob("node-*")):
                class_archive.keep(part)
        return [node.name for node in running]


def status(folder: Path) -> Status:
    """What is there and what of it is up. Starts nothing."""
    folder = folder.absolute()
    state, now = read_state(folder), time.time()
    if state is None:
        return Status(
            running=False,
            kind=None,
            title="no broker",
            bootstrap=None,
            data=folder,
            bytes_on_disk=0,
            uptime_s=None,
            nodes=(),
            settings={},
        )
    found = tuple(_node_status(node, now) for node in state.nodes)
    count = len(found)
    limits = LIMITS[state.kind]
    settings = {} if limits.expires_dead_members else {"kafka.static_members": "true"}
    return Status(
        running=2 * sum(node.up for node in found) > count,
        kind=state.kind,
        title=limits.title if count == 1 else f"Apache Kafka ({count} nodes)",
        bootstrap=state.bootstrap,
        data=folder / state.kind,
        bytes_on_disk=bytes_on_disk(folder / state.kind),
        uptime_s=max((n.uptime_s for n in found if n.uptime_s is not None), default=None),
        nodes=found,
        settings=settings,
    )


def _node_status(node: NodeState, now: float) -> NodeStatus:
    up = node.up
    return NodeStatus(
        name=node.name,
        address=node.address,
        up=up,
        pid=node.pid if up else None,
        uptime_s=round(max(0.0, now - node.started_at), 1) if up else None,
        log=node.log,
    )


def _wait(done: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
