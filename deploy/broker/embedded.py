"""The embedded broker: the noida-db binary that pip installs, its Kafka service alone, on loopback."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError, ConfigError
from ..processes import PortTakenError, accepts, spawn, tail, wait_until

STOP_SECONDS = 60.0
"""It writes a snapshot on SIGTERM: 3 s at 100 MB, 54 s at 1 GB."""
START_SECONDS = 30.0


def find_binary() -> Path:
    """The broker's executable; ConfigError with the alternatives where it is not installed."""
    spec = importlib.util.find_spec("noida_db")
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).parent / "noida-db"
        if binary.exists():
            return binary
    raise ConfigError(
        "the embedded broker (package noida-db, Linux only) is not installed: install it, set KAFKA_HOME to an "
        "unpacked Apache Kafka release, or give the address of a broker with --bootstrap"
    )


def command(data_dir: Path, *, host: str, port: int) -> list[str]:
    """What starts it. The packaged `noida-db` command is a wrapper that signals do not pass through."""
    data_dir.mkdir(parents=True, exist_ok=True)
    argv = [str(find_binary()), "start", "--data-dir", str(data_dir), "--only", "kafka"]
    return [*argv, "--kafka-port", str(port), "--host", host]


def start(
    command: Sequence[str], *, host: str, port: int, log: Path, death_signal: signal.Signals | None
) -> subprocess.Popen[bytes]:
    """Start it and wait until it answers; ConfigError with the end of its log if it does not."""
    process = spawn(command, log=log, death_signal=death_signal)
    try:
        why = wait_until(lambda: answers(host, port), process, timeout_s=START_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if why is not None:
        process.kill()
        process.wait()
        end = tail(log)
        if "already in use" in end:
            raise PortTakenError(
                f"embedded broker: port {port} on {host} is in use; choose another with --port"
            )
        if "already running" in end:
            raise ConfigError(
                "an embedded broker is running in this folder already: stop that run, or choose another --run-dir"
            )
        raise ConfigError(f"the embedded broker did not start on port {port}: {why}. {log} ends with\n{end}")
    return process


def answers(host: str, port: int) -> bool:
    """True once it takes requests."""
    from kafka.errors import KafkaError

    from ...streams.kafka import make_admin

    if not accepts(host, port):
        return False
    try:
        admin = make_admin(KafkaConfig(bootstrap=f"{host}:{port}"), client_id="headrace-launcher")
    except BrokerError:
        return False
    try:
        admin.list_topics()
        return True
    except KafkaError:
        return False
    finally:
        admin.close()
