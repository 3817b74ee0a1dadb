"""Holes in the offsets of a topic that a worker reads: transactions and compaction. Everything is read, lag reaches 0."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import NewTopic
from storms import calm_until, lags
from streams_records import a_trajectory, trajectory_headers
from streams_workers import config_for, streams_worker
from test_storm import read_all

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.config import Config
from headrace.schemas.sample import SAMPLE
from headrace.schemas.topics import DEADLETTERS, SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.app import ROLE
from headrace.streams.holes import HoleBook, holes_from
from headrace.streams.kafka import closing, make_admin, make_producer


def test_a_book_of_holes_leads_past_those_that_touch_and_forgets_what_is_behind() -> None:
    book = HoleBook()
    book.add([(10, 12), (3, 5)])
    book.add([(12, 20), (3, 4)])
    assert [book.past(n) for n in (2, 3, 4, 5, 9, 10, 15, 20)] == [2, 5, 5, 5, 9, 20, 20, 20]
    book.forget_below(20)
    assert book.past(3) == 3 and book.past(12) == 20


def transactional(config: Config) -> Any:
    producer = make_producer(
        config.kafka, client_id="test", transactional_id=f"{config.run.namespace}-writer"
    )
    producer.init_transactions()
    return producer


def put(producer: Any, topic: str, name: str, **where: Any) -> str:
    t = a_trajectory(name, group=name)
    producer.send(
        topic, key=name.encode(), value=TRAJECTORY.encode(t), headers=trajectory_headers(t), **where
    )
    return t.trajectory_id


def settled(config: Config, read: list[str]) -> dict[str, int]:
    group = Topics(config.run.namespace).group(ROLE)
    calm_until(None, lambda: not lags(config.kafka, group, read), timeout_s=90.0)
    return lags(config.kafka, group, read)


def samples_of(config: Config) -> list[str]:
    topic = Topics(config.run.namespace).name(SAMPLES, config.policy.id)
    return sorted({SAMPLE.decode(r.value, r.headers).trajectory_id for r in read_all(config, topic)})


@pytest.mark.timeout(240)
def test_trajectories_written_by_transactions_are_read_without_the_aborted_ones_and_the_lag_reaches_0(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    topic, wanted = topics.name(TRAJECTORIES), []
    with closing(transactional(config)) as producer:

        def write(n: int) -> None:
            producer.begin_transaction()
            names = [put(producer, topic, f"t{n}-{i}") for i in range(5)]
            if n % 3 == 1:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
                wanted.extend(names)

        for n in range(6):
            write(n)
        with streams_worker(config, tmp_path):
            read = [topic, topics.name(SCORES)]
            assert settled(config, read) == {}
            assert samples_of(config) == sorted(wanted)
            for n in range(6, 11):  # into a worker at the end; the last transaction is aborted
                write(n)
            assert settled(config, read) == {}
        assert samples_of(config) == sorted(wanted)


@pytest.mark.timeout(240)
def test_an_open_transaction_of_somebody_else_holds_up_its_partition_only_and_ends_no_worker(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    streams = {"watchdog_seconds": 4.0}
    config = config_for(kafka_broker.config, namespace, tmp_path, streams=streams)
    topics = Topics(namespace)
    topic = topics.name(TRAJECTORIES)
    with closing(transactional(config)) as open_one, closing(make_producer(config.kafka, client_id="t")) as p:
        open_one.begin_transaction()
        held = put(open_one, topic, "open", partition=0)
        open_one.flush()
        after = put(p, topic, "after", partition=0)
        other = put(p, topic, "other", partition=1)
        p.flush()
        with streams_worker(config, tmp_path) as worker:
            assert calm_until(None, lambda: samples_of(config) == [other], timeout_s=60.0)
            gone = calm_until(None, lambda: worker.process.poll() is not None, timeout_s=10.0)
            assert not gone, "ended although nothing readable was left"
            open_one.commit_transaction()
            assert settled(config, [topic, topics.name(SCORES)]) == {}
        assert samples_of(config) == sorted([held, after, other])


def compacted(config: Config, topic: str) -> None:
    """A topic that is compacted within seconds of being written."""
    settings = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "segment.ms": "500",
        "max.compaction.lag.ms": "1000",
        "message.timestamp.type": "LogAppendTime",
    }
    admin = make_admin(config.kafka)
    admin.create_topics([NewTopic(topic, 1, 1, topic_configs=settings)])
    admin.close()


@pytest.mark.timeout(240)
def test_a_compacted_topic_with_tombstones_is_read_to_its_end(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    topics = Topics(namespace)
    topic = topics.name(TRAJECTORIES)
    bare = Config.model_validate({"kafka": kafka_broker.config.model_dump()})
    compacted(bare, topic)
    config = config_for(kafka_broker.config, namespace, tmp_path)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        for round_ in range(3):
            for n in range(20):
                put(producer, topic, f"r{n}")
            producer.flush()
            time.sleep(0.7 if round_ < 2 else 0)  # a segment of its own
        for n in range(5):
            producer.send(topic, key=f"r{n}".encode(), value=None)
        producer.flush()
        put(producer, topic, "last")  # closes the segment, so that the tombstones can do their work
        producer.flush()

        def cleaned() -> bool:
            producer.send(topic, key=b"roll", value=b"x").get(10)
            return len(holes_from(config.kafka, topic, 0, 0)) > 0

        assert calm_until(None, cleaned, timeout_s=90.0), "the broker compacts nothing"
        with streams_worker(config, tmp_path):
            assert settled(config, [topic, topics.name(SCORES)]) == {}
    assert set(samples_of(config)) >= {f"r{n}.0" for n in range(5, 20)} | {"last.0"}
    reasons = read_all(config, topics.name(DEADLETTERS))
    assert reasons, "tombstones and the records without a schema are dead letters"
