"""A worker killed before it committed, and its successor: the same groups, the same advantages, nothing lost."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from storms import calm_until, lags
from streams_records import a_score, a_trajectory, take, trajectory_headers
from streams_workers import config_for, streams_worker
from table_worker import SAFE
from test_storm import read_all

from headrace.deploy.broker.launcher import Broker
from headrace.deploy.restart_file import read_restarts, write_restarts
from headrace.deploy.supervisor import RoleSpec, Supervisor
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.sample import SAMPLE, Sample
from headrace.schemas.score import SCORE, Score
from headrace.schemas.topics import SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.app import ROLE
from headrace.streams.kafka import closing, make_producer
from headrace.streams.recall import recall_before
from headrace.streams.verify import score_headers

FAR_MS = 600_000


def put_score(producer: Any, topic: str, score: Score) -> int:
    """Append to partition 0; the append time in milliseconds."""
    sent = producer.send(
        topic,
        key=score.group_id.encode(),
        value=SCORE.encode(score),
        headers=score_headers(score, []),
        partition=0,
    )
    return int(sent.get(10).timestamp)


def shown(sample: Sample) -> tuple[Any, ...]:
    return sample.trajectory_id, sample.fate, sample.reason, sample.advantage, sample.group_valid


def sendings(config: Config, group: str, count: int) -> list[tuple[Any, ...]]:
    """The group's samples in order, once there are `count`."""
    topic = Topics(config.run.namespace).name(SAMPLES, config.policy.id)

    def found() -> list[tuple[Any, ...]]:
        samples = [SAMPLE.decode(r.value, r.headers) for r in read_all(config, topic)]
        return [shown(s) for s in samples if s.group_id == group]

    assert calm_until(None, lambda: len(found()) >= count, timeout_s=60.0), found()
    return found()


def test_a_group_that_its_deadline_closed_is_closed_alike_after_a_kill_and_the_late_member_is_late_again(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    scores = topics.name(SCORES)
    now = int(time.time() * 1000)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        # Open at the head of the partition: no offset behind it is committed before it closes.
        waiting = {"group": "waiting", "size": 2, "group_deadline_ms": now + FAR_MS}
        put_score(producer, scores, a_score("w0", 1.0, **waiting))
        deadline = now + 15_000
        with streams_worker(config, tmp_path) as worker:
            for i, reward in enumerate([1.0, 0.0, 0.5]):
                at = put_score(producer, scores, a_score(f"r{i}", reward, group_deadline_ms=deadline))
                assert at <= deadline
            first = sendings(config, "g", 3)  # the clock closes it: nothing else comes
            late = a_score("r3", 1.0, group_deadline_ms=deadline)
            assert put_score(producer, scores, late) > deadline
            first = sendings(config, "g", 4)
            worker.kill()
        assert lags(config.kafka, topics.group(ROLE), [scores]) == {f"{scores}-0": 5}, "nothing is committed"
        with streams_worker(config, tmp_path):
            both = sendings(config, "g", 8)
            put_score(producer, scores, a_score("w1", 0.0, **waiting))
            sendings(config, "waiting", 2)
            assert calm_until(
                None, lambda: not lags(config.kafka, topics.group(ROLE), [scores]), timeout_s=60.0
            )
    again = both[4:]
    assert sorted(first) == sorted(again)
    assert sorted((s[0], s[2], s[4]) for s in first) == [
        ("r0.0", None, 3),
        ("r1.0", None, 3),
        ("r2.0", None, 3),
        ("r3.0", "late", 0),
    ]


SLOW = """
import time
async def reward(rollout, **args):
    import asyncio, pathlib
    if rollout.rollout_id == "r0" and not pathlib.Path(%r).exists():
        pathlib.Path(%r).touch()
        await asyncio.sleep(5)
    return 1.0
"""


def test_a_record_at_work_when_the_worker_is_killed_is_worked_on_again_and_those_after_it_are_kept(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    begun = str(tmp_path / "begun")
    (tmp_path / "slow_reward.py").write_text(SLOW % (begun, begun))
    config = config_for(
        kafka_broker.config, namespace, tmp_path, verify={"reward": "slow_reward:reward", "allow": ["write"]}
    )
    topics = Topics(namespace)
    trajectories, scores = topics.name(TRAJECTORIES), topics.name(SCORES)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        for i in range(10):
            t = a_trajectory(f"r{i}", group=f"g{i}", reward_spec=None)
            producer.send(
                trajectories,
                key=b"k",
                value=TRAJECTORY.encode(t),
                headers=trajectory_headers(t),
                partition=0,
            )
        producer.flush()
    with streams_worker(config, tmp_path) as worker:
        done = {SCORE.decode(r.value, r.headers).rollout_id for r in take(config.kafka, scores, 9)}
        worker.kill()
    assert done == {f"r{i}" for i in range(1, 10)}
    assert lags(config.kafka, topics.group(ROLE), [trajectories]) == {f"{trajectories}-0": 10}
    with streams_worker(config, tmp_path):
        read = [trajectories, scores]
        assert calm_until(None, lambda: not lags(config.kafka, topics.group(ROLE), read), timeout_s=60.0)
    found = [SCORE.decode(r.value, r.headers).rollout_id for r in read_all(config, scores)]
    assert set(found) == {f"r{i}" for i in range(10)} and found.count("r0") == 1


def test_recall_goes_back_as_far_as_the_deadlines_it_finds_lie_out(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path)
    topic = Topics(namespace).name(SCORES)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        for name, wait_s in (("old", 0.0), ("middle", 2.0), ("new", 2.0)):
            time.sleep(wait_s)  # append times are the broker's
            deadline = int(time.time() * 1000) + FAR_MS
            at = put_score(producer, topic, a_score(name, group=name, size=2, group_deadline_ms=deadline))

    seen: list[str] = []
    count = recall_before(
        config.kafka, topic, 0, 3, at_ms=at, span_ms=1000, recall=lambda group, *_: seen.append(group)
    )
    assert (count, sorted(seen)) == (3, ["middle", "new", "old"])


def test_a_worker_that_moves_nothing_ends_itself_and_is_started_anew_counted_as_stalled(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path, streams={"watchdog_seconds": 2.0})
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        producer.send(Topics(namespace).name(TRAJECTORIES), key=b"k", value=b"v").get(10)
    code = SAFE.replace('facts[event.value.decode()] = "seen"', "await asyncio.Event().wait()")
    assert code != SAFE
    path = tmp_path / "config.json"
    dump_config(config, path)
    log = tmp_path / "streams-0.log"
    supervisor = Supervisor(on_restart=lambda counts: write_restarts(tmp_path, counts))
    supervisor.start(RoleSpec(name="streams-0", argv=[sys.executable, "-c", code, str(path)], log=log))
    try:

        def restarted() -> bool:
            supervisor.check()
            return bool(read_restarts(tmp_path))

        assert calm_until(None, restarted, timeout_s=60.0), log.read_text()[-3000:]
        assert read_restarts(tmp_path) == {"streams-0": {"stalled": 1}}
        assert "no record moves" in log.read_text()
    finally:
        supervisor.stop(hurry=lambda: True)
