"""Two trainers for one policy: one writes. A stopped one that wakes is fenced, a second one refuses where it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer
from trainer_world import POLICY, World, terminate

from headrace.consumers.trainer import presence
from headrace.consumers.trainer.presence import Presence, members_of, refuse_second
from headrace.consumers.trainer.role import FENCED_STATUS
from headrace.schemas import topics as t
from headrace.schemas.config_file import dump_config
from headrace.schemas.errors import ConfigError, FencedError
from headrace.streams.kafka import closing, make_consumer, partitions_of, poll_records
from headrace.streams.metrics import RESTARTS_VARIABLE

SCRIPT = Path(__file__).parent / "trainer_kills.py"


@contextmanager
def stopping_at(world: World, point: str, nth: int) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has stopped itself at the `nth` call of `point`."""
    path = world.config.run.dir / "first.json"
    dump_config(world.config, path)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path), point, str(nth), "stop"], stderr=subprocess.PIPE, text=True
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"it ended instead: {status}"
        yield process
    finally:
        process.kill()
        process.communicate()


def values(world: World, *, isolation: str) -> list[bytes]:
    """The records of the weights topic as a reader with `isolation` sees them."""
    with closing(
        make_consumer(world.config.kafka, client_id="reader", isolation_level=isolation)
    ) as consumer:
        assert isinstance(consumer, KafkaConsumer)
        partitions = partitions_of(consumer, world.topics.name(t.WEIGHTS, POLICY))
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        (end,) = consumer.end_offsets(partitions).values()
        found: list[Any] = []
        while consumer.position(partitions[0]) < end:
            found += poll_records(consumer, idle_seconds=0.005)
        return [r.value for r in found]


# fetch: before the step it is about to make. sent: within its transaction, the record given to the client, which may
# have sent it, but no offsets. committing: within its transaction, with everything at the broker.
@pytest.mark.parametrize(("point", "nth"), [("fetch", 2), ("sent", 2), ("committing", 3)])
def test_a_stopped_trainer_that_wakes_after_another_took_over_is_fenced(
    kafka_broker: Any, namespace: str, tmp_path: Path, point: str, nth: int
) -> None:
    world = World(kafka_broker.config, namespace, tmp_path)
    world.feed(40)
    with stopping_at(world, point, nth) as first:
        group = world.topics.group("trainer-presence", POLICY)
        assert members_of(world.config.kafka, group) == ["127.0.0.1"]
        second = world.start(second="refuse", steps=4)  # waits until the session of the first has ended
        try:
            world.await_version(3, second)
            first.send_signal(signal.SIGCONT)
            _, log = first.communicate(timeout=60)
            _, other = second.communicate(timeout=60)
        finally:
            second.kill()
    assert first.returncode == FENCED_STATUS, log
    assert "another trainer has taken over policy 'policy'" in log and "Traceback" not in log
    assert second.returncode == 0, other
    versions = world.versions()
    assert [v.version for v in versions] == [0, 1, 2, 3, 4]
    refs = [ref for v in versions for ref in v.samples]
    assert len(refs) == len(set(refs)) == 32
    assert world.committed() == dict(versions[-1].consumed)
    committed = values(world, isolation="read_committed")
    aborted = [v for v in values(world, isolation="read_uncommitted") if v not in committed]
    assert len(aborted) == 1 or point != "committing", "what the first had sent is in the log"


def test_a_second_trainer_told_to_refuse_ends_and_the_first_goes_on(
    kafka_broker: Any, namespace: str, tmp_path: Path
) -> None:
    world = World(kafka_broker.config, namespace, tmp_path)
    world.feed(8)
    first = world.start()
    try:
        world.await_version(1, first)
        second = world.start(second="refuse")
        _, log = second.communicate(timeout=60)
        assert second.returncode == FENCED_STATUS, log
        assert "a trainer is at work for policy 'policy' (on 127.0.0.1)" in log and "--refuse" in log
        assert "Traceback" not in log
        world.feed(8)
        world.await_version(2, first)
    finally:
        terminate(first)
    assert first.returncode == 0
    assert [v.version for v in world.versions()] == [0, 1, 2]


def test_a_restart_by_the_supervisor_takes_over_whatever_second_says(
    kafka_broker: Any, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(kafka_broker.config, namespace, tmp_path)
    world.feed(16)
    first = world.start()
    try:
        world.await_version(2, first)
        monkeypatch.setenv(RESTARTS_VARIABLE, "killed=1")
        world.feed(8)
        began = time.monotonic()
        second = world.start(second="refuse", steps=3)
        _, log = second.communicate(timeout=60)
        assert second.returncode == 0, f"{time.monotonic() - began} s: {log}"
    finally:
        first.kill()
        first.communicate()
    assert [v.version for v in world.versions()] == [0, 1, 2, 3]


def test_refusing_is_refused_where_the_broker_does_not_notice_the_dead(
    embedded_broker: Any, namespace: str, tmp_path: Path
) -> None:
    world = World(embedded_broker.config, namespace, tmp_path)
    with pytest.raises(ConfigError, match="Use Apache Kafka"):
        refuse_second(world.config.kafka, "any", POLICY)


def test_a_member_counts_until_it_leaves(kafka_broker: Any, namespace: str, tmp_path: Path) -> None:
    world = World(kafka_broker.config, namespace, tmp_path)
    group = world.topics.group("trainer-presence", POLICY)
    refuse_second(world.config.kafka, group, POLICY)
    here = Presence(world.config.kafka, group, world.topics.name(t.WEIGHTS, POLICY))
    here.start()
    deadline = time.monotonic() + 30
    while not members_of(world.config.kafka, group):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    times = iter([0.0, 1.0, presence.SESSION_MS / 1000 + 2.5])
    slept: list[float] = []
    with pytest.raises(FencedError, match="take over"):
        refuse_second(world.config.kafka, group, POLICY, sleep=slept.append, now=lambda: next(times))
    assert slept == [0.5]
    here.close()
    refuse_second(world.config.kafka, group, POLICY, sleep=lambda _: pytest.fail("it has left"))
