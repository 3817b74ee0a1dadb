"""Makes a bare `pytest` work in a checkout where headrace is not installed; brokers for the tests.

`broker` runs a test on both kinds; `embedded_broker` and `kafka_broker` are one kind. Each kind is one process
for the whole session: tests keep apart by `namespace`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headrace.deploy.broker.launcher import Broker

ROOT = Path(__file__).resolve().parent.parent

if importlib.util.find_spec("headrace") is None:
    package = types.ModuleType("headrace")
    package.__path__ = [str(ROOT)]
    sys.modules["headrace"] = package

NO_KAFKA = "no Apache Kafka: set KAFKA_HOME to an unpacked release (kafka.apache.org/downloads; Java 17 or newer on PATH)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that uses Kafka by name, or where it is the best broker, carries the marker too."""
    kafka = {"kafka_broker", "kafka_cluster"} | ({"best_broker"} if os.environ.get("KAFKA_HOME") else set())
    for item in items:
        if kafka & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.kafka)


@pytest.fixture(scope="session", autouse=True)
def _no_fetched_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A release in the developer's own data folder changes no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def embedded_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The embedded broker, one process for the session."""
    from headrace.deploy.broker.launcher import start_broker

    with start_broker("embedded", tmp_path_factory.mktemp("embedded")) as running:
        yield running


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Apache Kafka, one process for the session; skips where there is none."""
    from headrace.deploy.broker.launcher import start_broker

    home = os.environ.get("KAFKA_HOME")
    if not home:
        pytest.skip(NO_KAFKA)
    with start_broker("kafka", tmp_path_factory.mktemp("kafka"), Path(home)) as running:
        yield running


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Three nodes of Apache Kafka, for the session; skips where there is none."""
    from headrace.deploy.broker.launcher import start_broker

    home = os.environ.get("KAFKA_HOME")
    if not home:
        pytest.skip(NO_KAFKA)
    with start_broker("kafka", tmp_path_factory.mktemp("cluster"), Path(home), nodes=3) as running:
        yield running


@pytest.fixture(scope="session", params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> Any:
    """Each kind in turn: an object with .kind, .bootstrap, .config (KafkaConfig) and .limits."""
    return request.getfixturevalue(f"{request.param}_broker")


@pytest.fixture(scope="session")
def best_broker(request: pytest.FixtureRequest) -> Any:
    """Apache Kafka where there is one, else the embedded broker: for what takes long and does not depend on the kind."""
    return request.getfixturevalue("kafka_broker" if os.environ.get("KAFKA_HOME") else "embedded_broker")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """An S3 server on this machine, one for the session."""
    from s3_server import S3Server

    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The S3 server (s3_server.S3Server), found by its environment variables, that refuses nothing."""
    s3_server.configure(monkeypatch)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    yield s3_server
    s3_server.refuse = None


@pytest.fixture
def namespace() -> str:
    """A topic prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"
