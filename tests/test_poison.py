"""Records that clients raise at stop no partition: a header name that is not UTF-8, good and bad records of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storms import calm_until, lags
from streams_records import a_trajectory, trajectory_headers
from streams_workers import config_for, streams_worker
from test_storm import read_all

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.sample import SAMPLE
from headrace.schemas.topics import DEADLETTERS, SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.app import ROLE
from headrace.streams.kafka import closing, make_producer


class BadName(str):
    """A header name that is not UTF-8 on the wire."""

    def encode(self, *args: Any) -> bytes:
        return b"\xff\xfe-name"


def test_header_names_that_are_not_utf_8_are_read_and_the_partition_moves_on(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    topic = topics.name(TRAJECTORIES)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        for i in range(10):
            t = a_trajectory(f"r{i}", group=f"g{i}")
            headers = trajectory_headers(t)
            if i in (3, 4):
                headers.append((BadName("bad"), b"\xff\x00"))
            value = b"garbage" if i == 4 else TRAJECTORY.encode(t)
            producer.send(topic, key=b"k", value=value, headers=headers, partition=0)
        producer.flush()
    with streams_worker(config, tmp_path):
        group, read = topics.group(ROLE), [topic, topics.name(SCORES)]
        assert calm_until(None, lambda: not lags(config.kafka, group, read), timeout_s=60.0)
    samples = read_all(config, topics.name(SAMPLES, config.policy.id))
    found = {SAMPLE.decode(r.value, r.headers).rollout_id for r in samples}
    assert found == {f"r{i}" for i in range(10) if i != 4}
    (letter,) = read_all(config, topics.name(DEADLETTERS))
    assert letter.value == b"garbage"
