"""The broker's time from deliveries: never early, however wrong the worker's own clock is."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from streams_records import a_trajectory, take, trajectory_headers
from streams_workers import CODE, StreamsProcess, config_for

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.sample import SAMPLE
from headrace.schemas.topics import SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.broker_clock import BUCKET_MS, BrokerClock
from headrace.streams.kafka import closing, make_producer


@pytest.mark.parametrize("ahead_ms", [-3_600_000, -5000, 0, 5000, 3_600_000])
def test_the_time_is_late_by_the_quickest_delivery_and_never_early(ahead_ms: int) -> None:
    clock, rng = BrokerClock(), random.Random(1)
    delays = [rng.randrange(3, 400) for _ in range(50)]
    for i, delay in enumerate(delays):
        local = 10**12 + i * 100
        clock.note(appended_ms=local - delay + ahead_ms, now_ms=local)
        assert clock.at(local) <= local + ahead_ms
    assert clock.at(10**12) == 10**12 + ahead_ms - min(delays)


def test_a_clock_that_is_set_is_followed_within_two_minutes() -> None:
    clock = BrokerClock()
    now = 10 * BUCKET_MS
    clock.note(appended_ms=now + 60_000, now_ms=now)
    for later in range(1, 4):  # the local clock was put forward by a minute
        clock.note(appended_ms=now + later * BUCKET_MS - 1, now_ms=now + later * BUCKET_MS)
    assert clock.ahead_ms == -1


def test_before_the_first_delivery_the_own_clock_has_to_do() -> None:
    assert BrokerClock().at(5) == 5


FAST = "import time\n_true = time.time\ntime.time = lambda: _true() + 3600.0\n"


def test_a_worker_whose_clock_is_an_hour_fast_waits_for_the_deadline(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    deadline = int(time.time() * 1000) + 300_000
    worker = StreamsProcess(config, tmp_path, code=FAST + CODE)
    try:
        with closing(make_producer(config.kafka, client_id="test")) as producer:

            def send(i: int) -> None:
                t = a_trajectory(f"r{i}", size=4, answer=f"8{4 + i % 2}$", group_deadline_ms=deadline)
                producer.send(
                    topics.name(TRAJECTORIES),
                    key=b"k",
                    value=TRAJECTORY.encode(t),
                    headers=trajectory_headers(t),
                ).get(10)

            for i in range(3):
                send(i)
            assert len(take(config.kafka, topics.name(SCORES), 3)) == 3
            assert not take(config.kafka, topics.name(SAMPLES, "policy"), 1, timeout_s=3.0)
            send(3)
            found = take(config.kafka, topics.name(SAMPLES, "policy"), 4)
    finally:
        worker.kill()
        print(worker.log.read_text()[-3000:])
    assert [SAMPLE.decode(r.value, r.headers).group_valid for r in found] == [4] * 4
