"""The feedback join in a streams worker: outcomes early, late, twice, contradictory, of unknown rollouts; kill -9."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka.partitioner import DefaultPartitioner
from hypothesis import given
from hypothesis import strategies as st
from kafka.admin import NewTopic
from kafka.partitioner.default import DefaultPartitioner as SyncPartitioner
from storms import calm_until, lags
from streams_records import a_trajectory, records_of, take, trajectory_headers
from streams_workers import StreamsProcess, config_for, streams_worker

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.config import Config
from headrace.schemas.errors import ConfigError
from headrace.schemas.feedback import FEEDBACK, Feedback
from headrace.schemas.sample import SAMPLE, Fate
from headrace.schemas.score import SCORE, Score
from headrace.schemas.topics import DEADLETTERS, SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.topics import FEEDBACK as FEEDBACK_TOPIC
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.feedback import OUTCOME, Fact
from headrace.streams.feedback_topics import prepare_feedback_topics
from headrace.streams.kafka import closing, make_admin, make_consumer, make_producer, partitions_of

WEIGHTS = {"enabled": True, "weights": {"accepted": 1.0}}


class Sender:
    """Sends trajectories and outcomes, each acknowledged by the broker."""

    def __init__(self, config: Config, producer: Any) -> None:
        self._topics, self._producer = Topics(config.run.namespace), producer

    def trajectory(self, name: str, *, wait: bool = True, **fields: Any) -> None:
        t = a_trajectory(name, **{"group": name, **fields})
        future = self._producer.send(
            self._topics.name(TRAJECTORIES),
            key=name.encode(),
            value=TRAJECTORY.encode(t),
            headers=trajectory_headers(t),
        )
        if wait:
            future.get(10)

    def outcome(
        self, name: str, value: float, *, id: str = "f", event: int = 1, wait: bool = True, **other: Any
    ) -> None:
        f = Feedback(
            **{
                "feedback_id": f"{name}-{id}",
                "rollout_id": name,
                "name": "accepted",
                "value": value,
                "event_ms": event,
                **other,
            }
        )
        future = self._producer.send(
            self._topics.name(FEEDBACK_TOPIC),
            key=name.encode(),
            value=FEEDBACK.encode(f),
            headers=[("schema", FEEDBACK.tag.encode())],
        )
        if wait:
            future.get(10)

    def raw(self, key: bytes, value: bytes) -> None:
        self._producer.send(self._topics.name(FEEDBACK_TOPIC), key=key, value=value).get(10)


@contextmanager
def sender(config: Config) -> Iterator[Sender]:
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        yield Sender(config, producer)
        producer.flush()


def scores_by_rollout(config: Config, wanted: int, *, timeout_s: float = 60.0) -> dict[str, Score]:
    """The first score of each of `wanted` rollouts; repeats must be equal."""
    found: dict[str, Score] = {}
    for r in records_of(config.kafka, Topics(config.run.namespace).name(SCORES), timeout_s=timeout_s):
        score = SCORE.decode(r.value, r.headers)
        known = found.setdefault(score.rollout_id, score)
        assert (known.reward, known.components) == (score.reward, score.components)
        if len(found) == wanted:
            break
    return found


def inputs(config: Config) -> list[str]:
    return [Topics(config.run.namespace).name(t) for t in (TRAJECTORIES, FEEDBACK_TOPIC)]


def reach_the_end(config: Config) -> bool:
    group = Topics(config.run.namespace).group("streams")
    return calm_until(None, lambda: not lags(config.kafka, group, inputs(config)), timeout_s=60.0)


@given(st.binary(max_size=40), st.integers(1, 40))
def test_all_clients_put_a_key_into_the_same_partition(key: bytes, count: int) -> None:
    partitions = list(range(count))

    class Cluster:
        def topics(self) -> set[str]:
            return {"t"}

        def partitions_for_topic(self, topic: str) -> set[int]:
            return set(partitions)

        def available_partitions_for_topic(self, topic: str) -> set[int]:
            return set(partitions)

    one = SyncPartitioner().partition("t", key, key, b"", b"", Cluster())
    assert one == DefaultPartitioner()(key, partitions, partitions)


def test_a_fact_comes_back_as_it_was() -> None:
    fact = Fact(OUTCOME, 3, 1_700_000_000_000, b"00-ab", b"\x00payload")
    assert Fact.decode(fact.encode()) == fact


def test_every_outcome_is_joined_or_counted(broker: Broker, namespace: str, tmp_path: Path) -> None:
    config = config_for(
        broker.config,
        namespace,
        tmp_path,
        feedback=WEIGHTS | {"settle": "window", "window_seconds": 6.0, "default": -0.5},
    )
    topics = Topics(namespace)
    with sender(config) as send, streams_worker(config, tmp_path) as worker:
        send.outcome("early", 1.0)
        send.trajectory("early")
        send.trajectory("contradicted")
        send.outcome("contradicted", 1.0, id="a", event=20)
        send.outcome("contradicted", 0.0, id="b", event=10)
        send.trajectory("twice")
        send.outcome("twice", 0.25)
        send.outcome("twice", 0.25)
        send.trajectory("silent")
        send.outcome("nobody", 1.0)
        send.raw(b"twice", b"garbage")
        send.raw(
            b"elsewhere",
            FEEDBACK.encode(
                Feedback(feedback_id="x", rollout_id="twice", name="accepted", value=9.0, event_ms=99)
            ),
        )
        found = scores_by_rollout(config, 4)
        samples = [
            SAMPLE.decode(r.value, r.headers) for r in take(config.kafka, topics.name(SAMPLES, "policy"), 4)
        ]
        letters = take(config.kafka, topics.name(DEADLETTERS), 2)
        assert reach_the_end(config)
        assert unknown_counted(worker)
        assert worker.stop() == 0
    assert {n: s.reward for n, s in found.items()} == {
        "early": 1.0,
        "contradicted": 1.0,
        "twice": 0.25,
        "silent": -0.5,
    }
    assert json.loads(found["contradicted"].components or "")["feedback.accepted.events"] == 2
    assert {s.rollout_id: s.fate for s in samples} == dict.fromkeys(found, Fate.ADMITTED)
    assert len(letters) == 2


def test_a_group_whose_members_settle_long_after_its_own_deadline_is_whole(
    broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(
        broker.config, namespace, tmp_path, feedback=WEIGHTS | {"window_seconds": 5.0, "default": 0.0}
    )
    soon = int(time.time() * 1000) + 1000
    with sender(config) as send:
        for name in ("a", "b"):
            send.trajectory(name, group="g", size=2, group_deadline_ms=soon)
        send.outcome("a", 1.0)
        with streams_worker(config, tmp_path):
            taken = take(config.kafka, Topics(namespace).name(SAMPLES, "policy"), 2)
    samples = {s.rollout_id: s for s in (SAMPLE.decode(r.value, r.headers) for r in taken)}
    assert {n: (s.fate, s.group_valid) for n, s in samples.items()} == dict.fromkeys("ab", (Fate.ADMITTED, 2))
    assert (samples["a"].advantage or 0) > 0 > (samples["b"].advantage or 0)


def unknown_counted(worker: StreamsProcess) -> bool:
    """The worker's metric counts the one outcome that met no trajectory."""
    port = int(re.findall(r"metrics at port=(\d+)", worker.log.read_text())[-1])

    def counted() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return 'headrace_feedback_outcomes_total{fate="unknown"} 1.0' in answer.read().decode()

    return calm_until(None, counted, timeout_s=30.0)


@pytest.mark.kafka
def test_kill_and_restart_with_a_backlog_loses_no_score_and_waits_on_from_the_table(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(
        kafka_broker.config,
        namespace,
        tmp_path,
        feedback=WEIGHTS | {"window_seconds": 600.0, "grace_seconds": 0.0},
    )
    changelog = Topics(namespace).changelog("streams", "outcomes")
    prepare_feedback_topics(config.kafka, Topics(namespace))
    count = 1200
    worker = StreamsProcess(config, tmp_path)
    try:
        with sender(config) as send:
            for i in range(count):
                send.trajectory(f"r{i}", wait=False)
            for i in range(
                0, count, 2
            ):  # half of the outcomes now, half when nothing but the table knows the rest
                send.outcome(f"r{i}", float(i), wait=False)
        for kept in (150, 700, 1400):
            take(config.kafka, changelog, kept)
            worker.kill()
            worker = StreamsProcess(config, tmp_path)
        assert len(scores_by_rollout(config, count // 2, timeout_s=90)) == count // 2
        assert reach_the_end(config)
        worker.kill()
        worker = StreamsProcess(config, tmp_path)
        with sender(config) as send:
            for i in range(1, count, 2):
                send.outcome(f"r{i}", float(i), wait=False)
        found = scores_by_rollout(config, count, timeout_s=90)
        assert {n: s.reward for n, s in found.items()} == {f"r{i}": float(i) for i in range(count)}
        assert reach_the_end(config)
    finally:
        worker.kill()
        print(worker.log.read_text()[-6000:])


@pytest.mark.kafka
def test_a_changelog_emptied_by_retention_recovers_at_once(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(
        kafka_broker.config, namespace, tmp_path, feedback=WEIGHTS | {"window_seconds": 600.0}
    )
    topics = Topics(namespace)
    changelog = topics.changelog("streams", "outcomes")
    prepare_feedback_topics(config.kafka, topics)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        for partition in range(TRAJECTORIES.partitions):
            for _ in range(5):
                producer.send(changelog, key=b"gone", value=None, partition=partition)
        producer.flush()
    with (
        closing(make_admin(config.kafka)) as admin,
        closing(make_consumer(config.kafka, client_id="test")) as consumer,
    ):
        tps = partitions_of(consumer, changelog)
        empty(admin, changelog, tps)
        assert consumer.beginning_offsets(tps) == consumer.end_offsets(tps) == dict.fromkeys(tps, 5)
    with sender(config) as send, streams_worker(config, tmp_path):
        send.trajectory("r")
        send.outcome("r", 2.0)
        assert scores_by_rollout(config, 1)["r"].reward == 2.0
        assert reach_the_end(config)


def empty(admin: Any, topic: str, tps: list[Any]) -> None:
    """Delete all records of `topic`; the broker allows it where the policy is not compact alone."""
    from kafka.admin import ConfigResource, ConfigResourceType

    def policy(value: str) -> None:
        admin.alter_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic, configs={"cleanup.policy": value})]
        )

    policy("compact,delete")
    admin.delete_records(dict.fromkeys(tps, 5))
    policy("compact")


def test_topics_with_different_partition_counts_are_refused(embedded_broker: Broker, namespace: str) -> None:
    topics = Topics(namespace)
    with closing(make_admin(embedded_broker.config)) as admin:
        admin.create_topics(
            [NewTopic(topics.name(TRAJECTORIES), 2, 1), NewTopic(topics.name(FEEDBACK_TOPIC), 3, 1)]
        )
    with pytest.raises(ConfigError, match="3 partitions"):
        prepare_feedback_topics(embedded_broker.config, topics)
