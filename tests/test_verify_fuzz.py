"""Mutated bytes through the running verify stage: every bad record becomes a dead letter, nothing behind it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutations
from streams_records import a_trajectory, records_of, trajectory_headers
from streams_workers import StreamsProcess, config_for, streams_worker

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.config import Config
from headrace.schemas.deadletter import read_dead_letter
from headrace.schemas.errors import InvalidMessageError
from headrace.schemas.score import SCORE
from headrace.schemas.topics import DEADLETTERS, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.kafka import closing, make_producer

EXAMPLES = 4
names = count()


@pytest.fixture(scope="module")
def worker(
    embedded_broker: Broker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Config, StreamsProcess]]:
    """One worker for all examples."""
    folder = tmp_path_factory.mktemp("fuzz")
    config = config_for(embedded_broker.config, f"fuzz-{folder.name}", folder)
    with streams_worker(config, folder) as process:
        yield config, process


def offsets_of_scores(config: Config, until: int) -> dict[int, Any]:
    """Offset in `trajectories` -> score, until that of offset `until` has come."""
    found = {}
    for record in records_of(config.kafka, Topics(config.run.namespace).name(SCORES), timeout_s=60.0):
        score = SCORE.decode(record.value, record.headers)
        found[score.ref.offset] = score
        if score.ref.offset >= until:
            break
    return found


def offsets_of_letters(config: Config, wanted: set[int]) -> dict[int, Any]:
    """Offset in `trajectories` -> dead letter, until all of `wanted` have come."""
    topics = Topics(config.run.namespace)
    found: dict[int, Any] = {}
    if not wanted:
        return found
    for record in records_of(config.kafka, topics.name(DEADLETTERS), timeout_s=60.0):
        letter = read_dead_letter(record.headers)
        assert (letter.topic, letter.partition) == (topics.name(TRAJECTORIES), 0)
        found[letter.offset] = (letter, record.value)
        if wanted <= found.keys():
            break
    return found


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(damage=st.lists(mutations(), min_size=20, max_size=40))
def test_every_bad_record_is_a_dead_letter_and_what_follows_is_processed(
    worker: tuple[Config, StreamsProcess], damage: list[Callable[[bytes], bytes]]
) -> None:
    config, process = worker
    topic = Topics(config.run.namespace).name(TRAJECTORIES)
    good = TRAJECTORY.encode(a_trajectory("good"))
    headers = trajectory_headers(a_trajectory("good"))
    sent: dict[int, bytes] = {}
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        for value in [mutate(good) for mutate in damage]:
            offset = producer.send(topic, key=b"k", value=value, headers=headers, partition=0).get(10).offset
            sent[offset] = value
        last = a_trajectory(f"last-{next(names)}")
        end = (
            producer.send(topic, key=b"k", value=TRAJECTORY.encode(last), headers=headers, partition=0)
            .get(10)
            .offset
        )
    scores = offsets_of_scores(config, end)
    assert scores[end].rollout_id == last.rollout_id
    bad = {offset for offset, value in sent.items() if not readable(value)}
    letters = offsets_of_letters(config, bad | (sent.keys() - scores.keys()))
    for offset, value in sent.items():
        if offset in bad:
            letter, original = letters[offset]
            assert letter.reason
            assert (original or b"") == value
        else:
            assert offset in scores or offset in letters
    assert process.process.poll() is None


def readable(value: bytes) -> bool:
    """True if it is still a valid trajectory."""
    try:
        TRAJECTORY.decode(value)
    except InvalidMessageError:
        return False
    return True
