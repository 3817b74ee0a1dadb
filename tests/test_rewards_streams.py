"""Rewards through the streams worker on both brokers: hostile ones, the built-in ones, one that breaks in a group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streams_records import a_trajectory, take, trajectory_headers
from streams_workers import config_for, streams_worker
from test_rewards_hosts import HOSTILE, REASONS

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.config import Config
from headrace.schemas.sample import SAMPLE, Fate, Sample
from headrace.schemas.score import SCORE, Score, ScoreStatus
from headrace.schemas.topics import SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY, Trajectory
from headrace.streams.kafka import closing, make_producer


@pytest.fixture(scope="session")
def broker(best_broker: Any) -> Any:
    """One kind is enough here."""
    return best_broker


def through(config: Config, folder: Path, rollouts: list[Trajectory]) -> tuple[list[Score], list[Sample]]:
    """The scores and samples of `rollouts`, which are appended to one partition in this order."""
    topics = Topics(config.run.namespace)
    with (
        streams_worker(config, folder) as worker,
        closing(make_producer(config.kafka, client_id="t")) as producer,
    ):
        for t in rollouts:
            producer.send(
                topics.name(TRAJECTORIES),
                key=t.rollout_id.encode(),
                value=TRAJECTORY.encode(t),
                headers=trajectory_headers(t),
                partition=0,
            )
        producer.flush()
        scores = take(config.kafka, topics.name(SCORES), len(rollouts), timeout_s=180.0)
        samples = take(config.kafka, topics.name(SAMPLES, "policy"), len(rollouts), timeout_s=60.0)
        assert worker.stop() == 0
    return [SCORE.decode(r.value, r.headers) for r in scores], [
        SAMPLE.decode(r.value, r.headers) for r in samples
    ]


def spec(name: str, **args: Any) -> str:
    return json.dumps({"name": name, "args": args})


def test_each_hostile_reward_has_its_reason_and_those_around_it_are_scored(
    broker: Broker, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    config = config_for(
        broker.config,
        namespace,
        tmp_path,
        verify={"timeout_seconds": 5.0, "memory_mb": 1024, "concurrency": 8},
    )
    outside = tmp_path / "outside"
    rollouts = [a_trajectory("first", group="first")]
    for name in REASONS:
        own = spec(f"hostile_rewards:{name}", path=str(outside))
        rollouts.append(a_trajectory(name, group=name, reward_spec=own))
        rollouts.append(
            a_trajectory(f"after {name}", group=f"after {name}", reward_spec=spec("hostile_rewards:prints"))
        )
    rollouts.append(a_trajectory("last", group="last"))
    scores, _ = through(config, tmp_path, rollouts)
    found = {s.rollout_id: s.reason if s.status is ScoreStatus.VOID else s.reward for s in scores}
    fine = {"first": 1.0, "last": 1.0, **{f"after {name}": 1.0 for name in REASONS}}
    assert found == {**fine, **REASONS}
    assert not outside.exists()


def test_one_nan_in_a_group_is_void_and_the_others_are_as_without_it(
    broker: Broker, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    config = config_for(broker.config, namespace, tmp_path)
    answers = {"a": "85$", "b": "84$", "nan": "85$", "c": "86$"}
    rollouts = [
        a_trajectory(
            name,
            group="one",
            size=4,
            answer=answer,
            reward_spec=spec("hostile_rewards:nan" if name == "nan" else "calculator"),
        )
        for name, answer in answers.items()
    ]
    rollouts += [
        a_trajectory(f"other {n}", group="two", size=2, answer=a) for n, a in (("x", "85$"), ("y", "8$"))
    ]
    scores, samples = through(config, tmp_path, rollouts)
    reasons = {s.rollout_id: s.reason for s in scores if s.status is ScoreStatus.VOID}
    assert reasons == {"nan": "reward_not_finite"}
    found = {s.rollout_id: s for s in samples}
    assert (found["nan"].fate, found["nan"].reason) == (Fate.DROPPED, "void")
    # rloo: the reward less the mean of the other valid members
    expected = {"a": 1.0, "b": -0.5, "c": -0.5, "other x": 1.0, "other y": -1.0}
    for name, advantage in expected.items():
        assert found[name].fate is Fate.ADMITTED
        assert found[name].advantage == pytest.approx(advantage), name


CODE = "```python\ndef add(a, b):\n    return a + b\n```"
SCHEMA = {"type": "object", "required": ["a"]}


def test_the_built_in_rewards_are_found_by_name(broker: Broker, namespace: str, tmp_path: Path) -> None:
    config = config_for(broker.config, namespace, tmp_path, verify={"failure_reward": -1.0})
    right, form = (
        {"reward": "numeric", "weight": 0.75, "args": {"answer": 85}},
        {"reward": "json_schema", "weight": 2},
    )
    form["args"] = {"schema": SCHEMA}
    asked = {
        "regex": (spec("regex", pattern=r"(?P<n>\d+)\$", group="n", answer="85"), "85$"),
        "schema": (spec("json_schema", schema=SCHEMA), '{"a": 1}$'),
        "no json": (spec("json_schema", schema=SCHEMA), "85$"),
        "code": (spec("python_tests", tests=["assert add(1, 1) == 2"], timeout_seconds=20), CODE),
        "composed": (spec("composed", parts={"right": right, "form": form}), "85$"),
        "no argument": (spec("numeric"), "85$"),
        "no judge": (spec("llm_judge", base_url="http://127.0.0.1:9", model="m", tries=1), "85$"),
    }
    rollouts = [a_trajectory(n, group=n, reward_spec=s, answer=a) for n, (s, a) in asked.items()]
    scores, _ = through(config, tmp_path, rollouts)
    found = {s.rollout_id: (s.status, s.reward, s.reason) for s in scores}
    assert found == {
        "regex": (ScoreStatus.SCORED, 1.0, None),
        "schema": (ScoreStatus.SCORED, 1.0, None),
        "no json": (ScoreStatus.FAILED, -1.0, "no_json"),
        "code": (ScoreStatus.SCORED, 1.0, None),
        "composed": (ScoreStatus.SCORED, -1.25, None),
        "no argument": (ScoreStatus.VOID, None, "reward_args"),
        "no judge": (ScoreStatus.VOID, None, "judge_unavailable"),
    }
    components = {s.rollout_id: json.loads(s.components) for s in scores if s.components}
    assert components["composed"] == {"right": 1.0, "form": -1.0}
    assert components["code"] == {"passed": 1.0, "tests": 1.0}
