"""One contract for brokers, run on both kinds; what a kind does not promise is read from its declared limits."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

import pytest
from kafka import TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from headrace.deploy.broker.launcher import Broker, choose_kind, start_broker
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import ConfigError
from headrace.schemas.topics import ALL_TOPICS, SCORES, TRAJECTORIES, WEIGHTS, Topics
from headrace.streams.kafka import closing, create_topics, make_admin, make_consumer, make_producer

BOTH = ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)]


def home_for(kind: str) -> Path | None:
    if kind == "embedded":
        return None
    home = os.environ.get("KAFKA_HOME")
    if not home:
        from conftest import NO_KAFKA

        pytest.skip(NO_KAFKA)
    return Path(home)


def make_topic(config: KafkaConfig, name: str, partitions: int = 1, **configs: str) -> None:
    with closing(make_admin(config)) as admin:
        admin.create_topics([NewTopic(name, partitions, 1, topic_configs=configs)])


def read(config: KafkaConfig, topic: str, count: int, *, timeout_s: float = 20.0, **settings) -> list:
    """The first `count` records of a one-partition topic (fewer if no more come in time)."""
    tp = TopicPartition(topic, 0)
    with closing(make_consumer(config, client_id="test-reader", **settings)) as consumer:
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        found: list = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count and time.monotonic() < deadline:
            for records in consumer.poll(200).values():
                found += records
        return found


def test_topics_are_created_from_the_table_and_only_once(broker: Broker, namespace: str) -> None:
    topics = Topics(namespace)
    created = create_topics(broker.config, topics, ["p"])
    assert len(created) == len(ALL_TOPICS)
    assert create_topics(broker.config, topics, ["p"]) == []
    with closing(make_consumer(broker.config, client_id="test")) as consumer:
        for spec in ALL_TOPICS:
            name = topics.name(spec, "p" if spec.per_policy else None)
            assert len(consumer.partitions_for_topic(name)) == spec.partitions, name


def test_records_come_back_byte_for_byte_with_key_and_headers(broker: Broker, namespace: str) -> None:
    topic = f"{namespace}.bytes"
    make_topic(broker.config, topic)
    headers = [("schema", b"trajectory/1"), ("empty", b""), ("raw", bytes(range(256))), ("schema", b"twice")]
    values = [b"\x00\xff\x80" * 7, bytes(range(256)), b"x"]
    with closing(make_producer(broker.config, client_id="test")) as producer:
        for value in values:
            producer.send(topic, key=b"k\x00", value=value, headers=headers).get(10)
    found = read(broker.config, topic, len(values))
    assert [r.value for r in found] == values
    assert all(r.key == b"k\x00" and list(r.headers) == headers for r in found)


def test_large_records_pass_where_the_topic_allows_them(broker: Broker, namespace: str) -> None:
    topics = Topics(namespace)
    create_topics(broker.config, topics, ["p"])
    big = os.urandom(2 * 1024 * 1024)
    name = topics.name(WEIGHTS, "p")
    with closing(make_producer(broker.config, client_id="test")) as producer:
        for _ in range(3):
            producer.send(name, value=big).get(20)
    assert [r.value == big for r in read(broker.config, name, 3)] == [True, True, True]


def test_end_offsets_count_the_records(broker: Broker, namespace: str) -> None:
    topic = f"{namespace}.ends"
    make_topic(broker.config, topic)
    tp = TopicPartition(topic, 0)
    with (
        closing(make_producer(broker.config, client_id="test")) as producer,
        closing(make_consumer(broker.config, client_id="test")) as consumer,
    ):
        for n in (30, 40):
            while consumer.end_offsets([tp])[tp] < n:
                for _ in range(10):
                    producer.send(topic, value=b"v")
                producer.flush()
            assert consumer.end_offsets([tp])[tp] == n
        assert consumer.beginning_offsets([tp])[tp] == 0


@pytest.mark.parametrize("spec", [SCORES, TRAJECTORIES], ids=lambda s: s.topic)
def test_the_broker_stamps_records_with_its_own_clock(broker: Broker, namespace: str, spec) -> None:
    topics = Topics(namespace)
    create_topics(broker.config, topics, ["p"])
    name = topics.name(spec)
    before = time.time() * 1000 - 1000
    with closing(make_producer(broker.config, client_id="test")) as producer:
        sent = producer.send(name, value=b"v", partition=0, timestamp_ms=1_000).get(10)
    record = read(broker.config, name, 1)[0]
    assert before <= record.timestamp <= time.time() * 1000 + 1000
    assert sent.timestamp == record.timestamp


def test_committed_offsets_are_read_right_after_the_commit(broker: Broker, namespace: str) -> None:
    topic, group = f"{namespace}.commits", f"{namespace}.group"
    make_topic(broker.config, topic)
    tp = TopicPartition(topic, 0)
    with closing(make_consumer(broker.config, client_id="test", group_id=group)) as consumer:
        consumer.assign([tp])
        for n in range(1, 11):
            consumer.commit({tp: OffsetAndMetadata(n, "", -1)})
            with closing(make_consumer(broker.config, client_id="test-2", group_id=group)) as other:
                assert other.committed(tp) == n


def test_a_transaction_moves_records_and_offsets_together(broker: Broker, namespace: str) -> None:
    topic, source, group = f"{namespace}.out", f"{namespace}.in", f"{namespace}.group"
    make_topic(broker.config, topic)
    make_topic(broker.config, source)
    tp = TopicPartition(source, 0)
    with (
        closing(make_producer(broker.config, client_id="test", transactional_id=namespace)) as producer,
        closing(make_consumer(broker.config, client_id="test", group_id=group)) as consumer,
    ):
        consumer.assign([tp])
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, value=b"aborted").get(10)
        producer.send_offsets_to_transaction({tp: OffsetAndMetadata(3, "", -1)}, group)
        producer.abort_transaction()
        assert consumer.committed(tp) is None
        for n in range(1, 6):
            producer.begin_transaction()
            producer.send(topic, value=b"%d" % n)
            producer.send_offsets_to_transaction({tp: OffsetAndMetadata(n, "", -1)}, group)
            producer.commit_transaction()
            with closing(make_consumer(broker.config, client_id="test-2", group_id=group)) as taker:
                assert taker.committed(tp) == n
    assert [r.value for r in read(broker.config, topic, 5)] == [b"1", b"2", b"3", b"4", b"5"]


def test_the_second_producer_of_a_transactional_id_fences_the_first(broker: Broker, namespace: str) -> None:
    topic = f"{namespace}.fence"
    make_topic(broker.config, topic)
    with (
        closing(make_producer(broker.config, client_id="old", transactional_id=namespace)) as old,
        closing(make_producer(broker.config, client_id="new", transactional_id=namespace)) as new,
    ):
        old.init_transactions()
        old.begin_transaction()
        old.send(topic, value=b"old").get(10)
        new.init_transactions()
        new.begin_transaction()
        new.send(topic, value=b"new")
        new.commit_transaction()
        with pytest.raises(KafkaError):
            old.commit_transaction()
    assert [r.value for r in read(broker.config, topic, 1)] == [b"new"]


def test_describe_cluster_is_answered_as_declared(broker: Broker) -> None:
    with closing(make_admin(broker.config)) as admin:
        if broker.limits.describes_cluster:
            assert [b["is_fenced"] for b in admin.describe_cluster()["brokers"]] == [False]
        else:
            with pytest.raises(KeyError):
                admin.describe_cluster()


def produce_and_commit(config: KafkaConfig, topic: str, group: str) -> list[bytes]:
    make_topic(config, topic)
    values = [uuid.uuid4().bytes for _ in range(500)]
    with closing(make_producer(config, client_id="test")) as producer:
        for future in [producer.send(topic, value=v) for v in values]:
            future.get(10)
    tp = TopicPartition(topic, 0)
    with closing(make_consumer(config, client_id="test", group_id=group)) as consumer:
        consumer.assign([tp])
        consumer.commit({tp: OffsetAndMetadata(77, "", -1)})
    return values


@pytest.mark.parametrize("kind", BOTH)
def test_a_clean_stop_keeps_records_and_offsets(kind, tmp_path: Path, namespace: str) -> None:
    home, topic, group = home_for(kind), f"{namespace}.kept", f"{namespace}.group"
    with start_broker(kind, tmp_path, home) as broker:
        values = produce_and_commit(broker.config, topic, group)
    with start_broker(kind, tmp_path, home, port=broker.port) as again:
        assert [r.value for r in read(again.config, topic, len(values))] == values
        with closing(make_consumer(again.config, client_id="test", group_id=group)) as consumer:
            assert consumer.committed(TopicPartition(topic, 0)) == 77
    assert not again.running


@pytest.mark.parametrize("kind", BOTH)
def test_kill_9_loses_nothing_acknowledged_where_that_is_declared(
    kind, tmp_path: Path, namespace: str
) -> None:
    home, topic, group = home_for(kind), f"{namespace}.killed", f"{namespace}.group"
    with start_broker(kind, tmp_path, home) as broker:
        values = produce_and_commit(broker.config, topic, group)
        broker.kill()
    with start_broker(kind, tmp_path, home) as again:
        if not again.limits.durable_on_kill:
            return
        assert [r.value for r in read(again.config, topic, len(values))] == values
        with closing(make_consumer(again.config, client_id="test", group_id=group)) as consumer:
            assert consumer.committed(TopicPartition(topic, 0)) == 77


@pytest.mark.parametrize("kind", BOTH)
def test_a_port_in_use_is_named(kind, tmp_path: Path) -> None:
    home = home_for(kind)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .*choose another"):
            start_broker(kind, tmp_path, home, port=port)


def test_a_missing_release_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no libs folder"):
        start_broker("kafka", tmp_path / "data", tmp_path)
    (tmp_path / "libs").mkdir()
    with pytest.raises(ConfigError, match=r"no kafka_\*\.jar"):
        start_broker("kafka", tmp_path / "data", tmp_path)


def test_a_missing_java_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.deploy.broker import apache

    monkeypatch.setattr(apache, "_java_candidate", lambda: None)
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka_2.13-4.3.1.jar").touch()
    with pytest.raises(ConfigError, match="needs Java 17 or newer"):
        start_broker("kafka", tmp_path / "data", tmp_path)


def test_auto_takes_kafka_where_one_is_at_hand(tmp_path: Path) -> None:
    bare = {"HEADRACE_DATA": str(tmp_path)}
    assert choose_kind(KafkaConfig(), bare) == ("embedded", None)
    assert choose_kind(KafkaConfig(), {"KAFKA_HOME": "/k"}) == ("kafka", Path("/k"))
    assert choose_kind(KafkaConfig(kafka_home=Path("/h")), {"KAFKA_HOME": "/k"}) == ("kafka", Path("/h"))
    assert choose_kind(KafkaConfig(broker="embedded"), {"KAFKA_HOME": "/k"}) == ("embedded", None)
    with pytest.raises(ConfigError, match="KAFKA_HOME"):
        choose_kind(KafkaConfig(broker="kafka"), bare)


def test_three_nodes_lose_nothing_when_one_is_killed_and_take_it_back(
    kafka_cluster: Broker, namespace: str
) -> None:
    config, name = kafka_cluster.config, f"{namespace}.survives"
    with closing(make_admin(config)) as admin:
        admin.create_topics([NewTopic(name, 1, config.replication_factor)])
    with closing(make_producer(config, client_id="test")) as producer:
        for number in range(3):
            victim = kafka_cluster.nodes[number]
            victim.kill()
            assert not kafka_cluster.running
            for i in range(20):
                producer.send(name, f"{number}-{i}".encode())
            producer.flush(timeout=60)
            kafka_cluster.restart()
            assert kafka_cluster.running
    wanted = [f"{number}-{i}".encode() for number in range(3) for i in range(20)]
    assert [record.value for record in read(config, name, len(wanted))] == wanted


@pytest.mark.parametrize("kind", BOTH)
def test_a_killed_broker_comes_back_on_the_same_address(kind, tmp_path: Path, namespace: str) -> None:
    with start_broker(kind, tmp_path, home_for(kind)) as running:
        make_topic(running.config, f"{namespace}.again")
        address = running.bootstrap
        running.kill()
        running.restart()
        assert running.bootstrap == address and running.running
        make_topic(running.config, f"{namespace}.more")


def test_several_nodes_of_the_embedded_broker_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one node"):
        start_broker("embedded", tmp_path, nodes=3)
