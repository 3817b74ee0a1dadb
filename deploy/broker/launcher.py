"""Starts either kind of broker behind one interface, in a folder of its own, on loopback.

with start_broker("embedded", run_dir / "broker") as broker:
    Config(kafka=broker.config)
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from ...schemas.config import KafkaConfig
from ...schemas.errors import ConfigError
from ..processes import PortTakenError, free_port, require_free_port, signal_group, stop
from .limits import LIMITS, BrokerKind, BrokerLimits


class Broker:
    """A running broker that this process started."""

    def __init__(
        self, kind: BrokerKind, bootstrap: str, data_dir: Path, process: subprocess.Popen[bytes], log: Path
    ) -> None:
        self.kind: BrokerKind = kind
        self.bootstrap = bootstrap
        self.data_dir = data_dir
        self.process = process
        self.log = log

    @property
    def limits(self) -> BrokerLimits:
        """What this kind of broker does and does not do."""
        return LIMITS[self.kind]

    @property
    def config(self) -> KafkaConfig:
        """How clients reach it, and what they must mind with it."""
        return KafkaConfig(bootstrap=self.bootstrap, static_members=not self.limits.expires_dead_members)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.bootstrap.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        """Of the broker process itself."""
        return self.process.pid

    def pids(self) -> list[int]:
        """All its processes."""
        return [self.pid]

    @property
    def running(self) -> bool:
        """False once the process has ended, for whatever reason."""
        return self.process.poll() is None

    def stop(self) -> None:
        """Clean stop: what was acknowledged is on disk afterwards. Idempotent."""
        from . import apache, class_archive, embedded

        grace = embedded.STOP_SECONDS if self.kind == "embedded" else apache.STOP_SECONDS
        stop(self.process, grace_s=grace)
        if self.kind == "kafka":
            class_archive.keep(self.data_dir)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        signal_group(self.process, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def choose_kind(config: KafkaConfig, env: Mapping[str, str] | None = None) -> tuple[BrokerKind, Path | None]:
    """Which broker to start, and the Kafka release for it: `auto` is Kafka where one is at hand, else embedded."""
    env = os.environ if env is None else env
    home = config.kafka_home or (Path(env["KAFKA_HOME"]) if env.get("KAFKA_HOME") else None)
    if config.broker == "embedded" or (config.broker == "auto" and home is None):
        return "embedded", None
    if home is None:
        raise ConfigError(
            'kafka.broker = "kafka", but there is no Kafka to start: set KAFKA_HOME or kafka.kafka_home to an '
            "unpacked Apache Kafka release, or give the address of a running broker with --bootstrap"
        )
    return "kafka", home


def start_broker(
    kind: BrokerKind,
    data_dir: Path,
    kafka_home: Path | None = None,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    log: Path | None = None,
    attempts: int = 3,
) -> Broker:
    """Start a broker on `port` (None: a free one) with its data in `data_dir`, and wait until it is usable.

    Raises ConfigError when the port is in use or a part (the binary, java, the jars) is missing.
    """
    from . import apache, embedded

    data_dir = data_dir.resolve()
    log = log or data_dir / "broker.log"
    if port is not None:
        require_free_port(
            port, host=host, what=LIMITS[kind].title, how="choose another with --port, or leave it out"
        )
        attempts = 1
    while True:
        attempts -= 1
        chosen = port or free_port(host)
        try:
            if kind == "embedded":
                process = embedded.start(data_dir, host=host, port=chosen, log=log)
            else:
                home = kafka_home or choose_kind(KafkaConfig(broker="kafka"))[1]
                assert home is not None
                process = apache.start(data_dir, home, host=host, port=chosen, log=log)
        except PortTakenError:
            # Somebody took the free port between the look and the start.
            if not attempts:
                raise
            continue
        return Broker(kind, f"{host}:{chosen}", data_dir, process, log)
