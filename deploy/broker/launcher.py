"""Starts either kind of broker behind one interface, in a folder of its own, on loopback.

with start_broker("embedded", run_dir / "broker") as broker:
    Config(kafka=broker.config)
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError, ConfigError
from ..processes import (
    PortTakenError,
    free_port,
    require_free_port,
    signal_group,
    spawn,
    stop,
    tail,
    wait_until,
)
from .choice import choose_kind
from .limits import LIMITS, BrokerKind, BrokerLimits

RESTART_SECONDS = 60.0
DEATH_SIGNAL = signal.SIGTERM
"""Of nodes that end with the process that started them."""


class Node:
    """One process of a broker. It is started anew with the same command, on the same port and data."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        command: Sequence[str],
        log: Path,
        death_signal: signal.Signals | None = DEATH_SIGNAL,
    ) -> None:
        self.name = name
        self.process = process
        self.command = list(command)
        self.log = log
        self.death_signal = death_signal

    @property
    def running(self) -> bool:
        """False once the process has ended, for whatever reason."""
        return self.process.poll() is None

    def kill(self) -> None:
        """kill -9, as a crash would."""
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()

    def launch(self) -> None:
        """Start it again, without waiting until it is usable."""
        self.process = spawn(self.command, log=self.log, death_signal=self.death_signal)


class Broker:
    """A running broker that this process started: one node, or several."""

    def __init__(self, kind: BrokerKind, bootstrap: str, data_dir: Path, nodes: Sequence[Node]) -> None:
        self.kind: BrokerKind = kind
        self.bootstrap = bootstrap
        """Of all nodes."""
        self.data_dir = data_dir
        self.nodes = list(nodes)

    @property
    def limits(self) -> BrokerLimits:
        """What this kind of broker does and does not do."""
        return LIMITS[self.kind]

    @property
    def title(self) -> str:
        """For people."""
        return self.limits.title if len(self.nodes) == 1 else f"Apache Kafka ({len(self.nodes)} nodes)"

    @property
    def config(self) -> KafkaConfig:
        """How clients reach it, and what they must mind with it."""
        return KafkaConfig(
            bootstrap=self.bootstrap,
            static_members=not self.limits.expires_dead_members,
            replication_factor=len(self.nodes),
        )

    @property
    def port(self) -> int:
        """Where its first node listens."""
        return int(self.bootstrap.partition(",")[0].rpartition(":")[2])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """Of the first node."""
        return self.nodes[0].process

    @property
    def log(self) -> Path:
        """Of the first node."""
        return self.nodes[0].log

    @property
    def pid(self) -> int:
        """Of the first node."""
        return self.process.pid

    def pids(self) -> list[int]:
        """All its processes."""
        return [node.process.pid for node in self.nodes]

    @property
    def running(self) -> bool:
        """True while every node runs."""
        return all(node.running for node in self.nodes)

    def restart(self, *, timeout_s: float = RESTART_SECONDS) -> None:
        """Start the nodes that have ended, and wait until the broker has all of them. BrokerError if not in time."""
        from . import apache, embedded

        dead = [node for node in self.nodes if not node.running]
        for node in dead:
            node.launch()
        host, _, port = self.bootstrap.partition(",")[0].rpartition(":")

        def ready() -> bool:
            if self.kind == "embedded":
                return embedded.answers(host, int(port))
            return apache.usable(self.bootstrap, len(self.nodes))

        for node in dead:
            why = wait_until(ready, node.process, timeout_s=timeout_s, interval_s=0.1)
            if why is not None:
                raise BrokerError(
                    f"{node.name} did not come back: {why}. {node.log} ends with\n{tail(node.log)}"
                )

    @property
    def grace_s(self) -> float:
        """How long a clean stop may take."""
        from . import apache, embedded

        return embedded.STOP_SECONDS if self.kind == "embedded" else apache.STOP_SECONDS

    def stop(self) -> None:
        """Clean stop: what was acknowledged is on disk afterwards. Idempotent."""
        for node in self.nodes[1:]:
            node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            stop(node.process, grace_s=self.grace_s)
        self.tidy()

    def tidy(self) -> None:
        """After a stop: keep what makes the next start fast."""
        from . import class_archive

        if self.kind == "kafka":
            for folder in (self.data_dir, *self.data_dir.glob("node-*")):
                class_archive.keep(folder)

    def kill(self) -> None:
        """kill -9 of every node."""
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_broker(
    kind: BrokerKind,
    data_dir: Path,
    kafka_home: Path | None = None,
    *,
    port: int | Sequence[int] | None = None,
    nodes: int = 1,
    host: str = "127.0.0.1",
    log: Path | None = None,
    attempts: int = 3,
    outlives: bool = False,
) -> Broker:
    """Start a broker with its data in `data_dir`, and wait until it is usable.

    It listens on `port` and, with several `nodes`, on those that follow it; or on one of a list each; None: on free
    ones. `outlives`: it goes on when this process ends. Several nodes are
    for Apache Kafka: every topic is replicated to all of them, and any one may be lost. Raises ConfigError when a
    port is in use or a part (the binary, java, the jars) is missing.
    """
    if kind == "embedded" and nodes != 1:
        raise ConfigError(f"{LIMITS[kind].title} has one node, not {nodes}; use Apache Kafka (KAFKA_HOME)")
    data_dir = data_dir.resolve()
    log = log or data_dir / "broker.log"
    wanted = [port + n for n in range(nodes)] if isinstance(port, int) else port
    if wanted is not None:
        for one in wanted:
            how = "choose another with --port, or leave it out"
            require_free_port(one, host=host, what=LIMITS[kind].title, how=how)
        attempts = 1
    while True:
        attempts -= 1
        ports = list(wanted) if wanted is not None else [free_port(host) for _ in range(nodes)]
        try:
            started = _start(kind, data_dir, kafka_home, ports, host, log, None if outlives else DEATH_SIGNAL)
        except PortTakenError:
            # Somebody took the free port between the look and the start.
            if not attempts:
                raise
            continue
        return Broker(kind, ",".join(f"{host}:{p}" for p in ports), data_dir, started)


def _start(
    kind: BrokerKind,
    data_dir: Path,
    home: Path | None,
    ports: Sequence[int],
    host: str,
    log: Path,
    death_signal: signal.Signals | None,
) -> list[Node]:
    from . import apache, embedded

    if kind == "embedded":
        command = embedded.command(data_dir, host=host, port=ports[0])
        process = embedded.start(command, host=host, port=ports[0], log=log, death_signal=death_signal)
        return [Node("broker", process, command, log, death_signal)]
    home = home or choose_kind(KafkaConfig(broker="kafka"))[1]
    assert home is not None
    plans = apache.plan_nodes(data_dir, ports, host=host, log=log)
    commands = apache.commands(plans, home)
    processes = [
        apache.launch(command, plan, death_signal) for command, plan in zip(commands, plans, strict=True)
    ]
    apache.wait_usable(processes, plans)
    return [
        Node(
            "broker" if len(plans) == 1 else f"broker-{plan.number}", process, command, plan.log, death_signal
        )
        for plan, process, command in zip(plans, processes, commands, strict=True)
    ]
