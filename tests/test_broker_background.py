"""A broker that outlives the command that started it: state, idempotent start, killed nodes, clean stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.deploy.broker.background import start, status, stop
from headrace.deploy.broker.background_state import STATE
from headrace.deploy.broker.pids import kill_group, process_start
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigError
from headrace.schemas.topics import TASKS, Topics
from headrace.streams.kafka import closing, create_topics, make_consumer, make_producer

EMBEDDED = KafkaConfig(broker="embedded")
HEADRACE = [sys.executable, "-m", "headrace.deploy.cli"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "broker"
    for node in status(tmp_path / "broker").nodes:
        if node.pid is not None:
            kill_group(node.pid)


def headrace(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*HEADRACE, *args], capture_output=True, text=True, timeout=120, check=False)


def count(config: KafkaConfig, topic: str) -> int:
    from kafka import TopicPartition

    with closing(make_consumer(config, client_id="test")) as consumer:
        partitions = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic)]
        return sum(consumer.end_offsets(partitions).values())


def test_it_outlives_the_command_and_status_tells(folder: Path) -> None:
    at = ["--data", str(folder), "--json"]
    assert headrace("broker", "status", *at).returncode == 1
    done = headrace("broker", "start", "--kind", "embedded", *at)
    assert done.returncode == 0, done.stderr
    started = json.loads(done.stdout)
    shown = headrace("broker", "status", *at)
    found = json.loads(shown.stdout)
    assert shown.returncode == 0 and found["running"] and found["kind"] == "embedded"
    node = found["nodes"][0]
    assert node["up"] and node["pid"] == started["nodes"][0]["pid"] and node["uptime_s"] >= 0
    assert os.getsid(node["pid"]) == node["pid"]
    assert found["bootstrap"] == node["address"] and found["bytes_on_disk"] > 0
    assert json.loads(headrace("broker", "start", *at).stdout)["started"] == []
    assert json.loads(headrace("broker", "stop", *at).stdout) == {"stopped": ["broker"]}
    assert headrace("broker", "status", *at).returncode == 1 and process_start(node["pid"]) is None
    assert json.loads(headrace("broker", "stop", *at).stdout) == {"stopped": []}


def test_the_address_and_the_records_stay_over_a_stop(folder: Path, namespace: str) -> None:
    first, _ = start(folder, EMBEDDED, nodes=None, port=None)
    config, topics = KafkaConfig(bootstrap=first.bootstrap), Topics(namespace)
    create_topics(config, topics, ["policy"])
    with closing(make_producer(config, client_id="test")) as producer:
        producer.send(topics.name(TASKS), b"x").get(10)
    stop(folder)
    again, started = start(folder, KafkaConfig(), nodes=None, port=None)
    assert started == ["broker"] and again.bootstrap == first.bootstrap
    assert count(config, topics.name(TASKS)) == 1


def test_a_killed_broker_is_shown_and_started_again(folder: Path) -> None:
    first, _ = start(folder, EMBEDDED, nodes=None, port=None)
    pid = first.nodes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not status(folder).running
    again, started = start(folder, EMBEDDED, nodes=None, port=None)
    assert again.running and started == ["broker"] and again.bootstrap == first.bootstrap


def test_another_process_with_the_same_id_is_left_alone(folder: Path) -> None:
    start(folder, EMBEDDED, nodes=None, port=None)
    stop(folder)
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
        state["nodes"][0]["pid"] = stranger.pid
        (folder / STATE).write_text(json.dumps(state))
        assert not status(folder).running and stop(folder) == [] and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_the_folder_is_not_for_is_refused(folder: Path) -> None:
    found, _ = start(folder, EMBEDDED, nodes=None, port=None)
    assert found.bootstrap is not None
    port = int(found.bootstrap.rpartition(":")[2])
    with pytest.raises(ConfigError, match="of 1 node"):
        start(folder, EMBEDDED, nodes=3, port=None)
    with pytest.raises(ConfigError, match="not the kafka one"):
        start(folder, KafkaConfig(broker="kafka"), nodes=None, port=None)
    with pytest.raises(ConfigError, match=f"runs on port {port}, not {port % 60000 + 1}"):
        start(folder, EMBEDDED, nodes=None, port=port % 60000 + 1)


def test_a_port_in_use_is_named_and_nothing_is_kept(folder: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="--port"):
            start(folder, EMBEDDED, nodes=None, port=s.getsockname()[1])
    assert status(folder).kind is None


def test_a_damaged_state_file_is_named(folder: Path) -> None:
    folder.mkdir()
    (folder / STATE).write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        start(folder, EMBEDDED, nodes=None, port=None)
    (folder / STATE).unlink()


@pytest.mark.kafka
@pytest.mark.skipif(not os.environ.get("KAFKA_HOME"), reason="no Apache Kafka: set KAFKA_HOME")
def test_three_nodes_keep_what_was_acknowledged_while_one_is_killed_and_taken_back(
    folder: Path, namespace: str
) -> None:
    first, started = start(folder, KafkaConfig(broker="kafka"), nodes=3, port=None)
    assert len(started) == 3 and first.settings == {}
    config, topics = KafkaConfig(bootstrap=first.bootstrap), Topics(namespace)
    create_topics(config, topics, ["policy"])
    victim = first.nodes[1]
    assert victim.pid is not None
    with closing(make_producer(config, client_id="test")) as producer:
        producer.send(topics.name(TASKS), b"before").get(20)
        os.kill(victim.pid, signal.SIGKILL)
        os.waitpid(victim.pid, 0)
        during = status(folder)
        assert during.running and [node.up for node in during.nodes] == [True, False, True]
        producer.send(topics.name(TASKS), b"during").get(60)
    again, started = start(folder, KafkaConfig(), nodes=None, port=None)
    assert started == [victim.name] and all(node.up for node in again.nodes)
    assert again.bootstrap == first.bootstrap
    assert count(config, topics.name(TASKS)) == 2
    assert len(stop(folder)) == 3 and not status(folder).running
