"""Which broker to start, and why: Apache Kafka where a release is at hand, else the embedded one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...schemas.config import KafkaConfig
from ...schemas.errors import ConfigError
from .apache import find_java, java_title
from .data_dir import fetched_release, release_version
from .limits import LIMITS, BrokerKind


@dataclass(frozen=True, slots=True)
class Choice:
    """One kind of broker, the Kafka release for it, and the reason in words."""

    kind: BrokerKind
    home: Path | None
    reason: str


def choose(config: KafkaConfig, env: Mapping[str, str] | None = None) -> Choice:
    """kafka_home, KAFKA_HOME, then a release that was fetched and has a Java; else the embedded broker.

    ConfigError where Apache Kafka is asked for and there is none.
    """
    env = os.environ if env is None else env
    embedded = LIMITS["embedded"].title
    if config.broker == "embedded":
        return Choice("embedded", None, f'{embedded}: kafka.broker is "embedded"')
    if config.kafka_home is not None:
        return _kafka(config.kafka_home, "kafka.kafka_home", config.nodes)
    if env.get("KAFKA_HOME"):
        return _kafka(Path(env["KAFKA_HOME"]), "KAFKA_HOME", config.nodes)
    fetched = fetched_release(env)
    if fetched is not None:
        try:
            find_java()
        except ConfigError as e:
            if config.broker == "auto":
                return Choice("embedded", None, f"{embedded}: {_release(fetched)} was fetched, but {e}")
        return _kafka(fetched, "fetched", config.nodes)
    if config.broker == "kafka":
        raise ConfigError(
            'kafka.broker = "kafka", but there is no Kafka to start: `headrace broker fetch` brings one; or set '
            "KAFKA_HOME or kafka.kafka_home to an unpacked Apache Kafka release, or give the address of a running "
            "broker with --bootstrap"
        )
    return Choice(
        "embedded",
        None,
        f"{embedded}: there is no Apache Kafka here (`headrace broker fetch` brings one, which loses nothing "
        "when it is killed)",
    )


def choose_kind(config: KafkaConfig, env: Mapping[str, str] | None = None) -> tuple[BrokerKind, Path | None]:
    """Which broker to start, and the Kafka release for it. Raises as `choose`."""
    found = choose(config, env)
    return found.kind, found.home


def broker_reason(config: KafkaConfig, env: Mapping[str, str] | None = None) -> str:
    """Which broker a run with this configuration uses, and why, in one sentence. Raises as `choose`."""
    if config.bootstrap is not None:
        return f"the broker at {config.bootstrap}"
    return choose(config, env).reason


def short(path: Path) -> str:
    """With ~ for the home folder."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def _kafka(home: Path, source: str, nodes: int) -> Choice:
    try:
        java = java_title(find_java())
    except ConfigError:
        # The start says so, with the way out.
        java = "no usable Java"
    several = f", {nodes} nodes" if nodes > 1 else ""
    return Choice("kafka", home, f"{_release(home)} from {short(home)} ({source}), {java}{several}")


def _release(home: Path) -> str:
    version = release_version(home)
    return f"Apache Kafka {version}" if version is not None else "Apache Kafka"
