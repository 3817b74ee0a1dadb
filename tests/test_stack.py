"""The stack's parts that need no roles: run folders, tasks on the topic, a broker kept small, what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kafka import TopicPartition

from headrace.deploy.broker.launcher import Broker
from headrace.deploy.presets import PRESETS
from headrace.deploy.run_dir import check_same_run, clear, locked
from headrace.deploy.stack import Plan, Stack, _retention, role_environment
from headrace.schemas.config import Config, RunConfig
from headrace.schemas.config_file import dump_config, load_config
from headrace.schemas.errors import ConfigError
from headrace.schemas.task import TASK, Task, check_task
from headrace.schemas.topics import SCORES, TASKS, Topics
from headrace.streams.kafka import closing, create_topics, make_consumer, make_producer


def stack(config: Config, *tasks: Task) -> Stack:
    return Stack(Plan(config=config, tasks=tasks), tick=lambda phase: None, hurry=lambda: False)


def test_a_run_folder_is_held_by_one_run(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from headrace.deploy.run_dir import locked
with locked(Path({str(tmp_path)!r})): pass
"""
    with locked(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"is in use by another run (process {os.getpid()})" in done.stderr
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("below", ["file/run", "file"])
def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / below
    with pytest.raises(ConfigError, match=rf"{path} cannot be made .*--run-dir"), locked(path):
        pass


def test_only_what_an_earlier_demo_left_is_cleared(tmp_path: Path) -> None:
    clear(tmp_path, marker="demo")
    for name in ("demo", "config.json"):
        (tmp_path / name).touch()
    (tmp_path / "blobs" / "w").mkdir(parents=True)
    clear(tmp_path, marker="demo")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex: choose an empty"):
        clear(tmp_path, marker="demo")
    (tmp_path / "demo").touch()
    with pytest.raises(ConfigError, match=r"holds thesis\.tex"):
        clear(tmp_path, marker="demo")
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("run.namespace", "other", r"run\.namespace is headrace there and other now"),
        ("policy.id", "other", r"policy\.id is policy there and other now"),
        ("policy.model", "/m/other", r"policy\.model is /m/one there and /m/other now"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path: Path, key: str, value: str, message: str) -> None:
    settings: dict[str, object] = {"policy.model": "/m/one"}
    check_same_run(tmp_path, load_config(overrides=settings))
    dump_config(load_config(overrides=settings), tmp_path / "config.json")
    check_same_run(tmp_path, load_config(overrides={**settings, "trainer.lr": 1.0, "trainer.steps": 9}))
    with pytest.raises(ConfigError, match=message + r"; use another folder with --run-dir"):
        check_same_run(tmp_path, load_config(overrides={**settings, key: value}))


def test_a_folder_whose_run_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"run":')
    with pytest.raises(ConfigError, match=r"config\.json, of an earlier run, cannot be read"):
        check_same_run(tmp_path, Config())


def test_a_run_of_another_kind_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match="holds another run"):
        clear(tmp_path, marker="demo")


def test_tasks_are_sent_once_and_again_when_they_change(broker: Broker, namespace: str) -> None:
    config = Config(run=RunConfig(namespace=namespace), kafka=broker.config)
    topic = Topics(namespace).name(TASKS)
    create_topics(broker.config, Topics(namespace), ["policy"])
    first = Task(task_id="a", policy_id="policy", prompt="1")
    second = Task(task_id="b", policy_id="policy", prompt="2")
    for tasks in (
        [first, second],
        [first, second],
        [first, Task(task_id="b", policy_id="policy", prompt="3")],
    ):
        stack(config, *tasks)._publish(topic)
    with closing(make_consumer(broker.config, client_id="test")) as consumer:
        tp = TopicPartition(topic, 0)
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        found: list = []
        while len(found) < 3:
            for records in consumer.poll(200).values():
                found += records
        assert consumer.end_offsets([tp])[tp] == 3
    assert [TASK.decode(r.value, r.headers).prompt for r in found] == ["1", "2", "3"]
    assert [r.key for r in found] == [b"a", b"b", b"b"]


def test_the_embedded_broker_is_kept_small(embedded_broker: Broker, namespace: str) -> None:
    topics = Topics(namespace)
    settings = _retention(Config())
    create_topics(embedded_broker.config, topics, ["policy"], settings=settings)
    kept = int(settings[SCORES.topic]["retention.bytes"])
    tp = TopicPartition(topics.name(SCORES), 0)
    with closing(make_producer(embedded_broker.config, client_id="test")) as producer:
        for _ in range(4 * kept // 65536):
            producer.send(tp.topic, os.urandom(65536), partition=0)
        producer.flush()
    with closing(make_consumer(embedded_broker.config, client_id="test")) as consumer:
        end, deadline, left = consumer.end_offsets([tp])[tp], time.monotonic() + 30, kept
        while left * 65536 > 2 * kept:
            assert time.monotonic() < deadline, f"{left} of {end} records are still there"
            left = end - consumer.beginning_offsets([tp])[tp]
    assert left * 65536 > kept // 2


def test_retention_covers_what_the_trainer_may_ask_for() -> None:
    config = load_config(overrides={"trainer.batch_size": 1024, "rollout.max_total_tokens": 1000})
    needed = 1024 * (config.staleness.max_lag + 1 + config.trainer.checkpoint_every) * 2048 / 4
    assert int(_retention(config)["trajectories"]["retention.bytes"]) > needed


def test_two_streams_workers_on_the_embedded_broker_are_refused(tmp_path: Path) -> None:
    config = load_config(
        overrides={"streams.workers": 2, "kafka.broker": "embedded", "run.dir": str(tmp_path)}
    )
    with pytest.raises(ConfigError, match=r"streams\.workers = 2: the embedded broker .* takes at most 1"):
        stack(config).start()


def test_overrides_stay_with_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TRAINER__LR", "1")
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "DEBUG")
    env = role_environment([Path("/a"), Path("/b")])
    assert "HEADRACE_TRAINER__LR" not in env and env["HEADRACE_LOG_LEVEL"] == "DEBUG"
    assert env["HEADRACE_PLUGIN_PATH"] == os.pathsep.join(["/a", "/b"])


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_valid_configurations_with_valid_tasks(name: str) -> None:
    preset = PRESETS[name]
    config = load_config(overrides=preset.settings)
    assert config.trainer.batch_size % config.rollout.group_size == 0
    tasks = list(preset.tasks())
    for task in tasks:
        check_task(task)
    assert len({t.task_id for t in tasks}) == len(tasks) == {"calculator": 1600, "addition": 55}[name]
    assert {t.policy_id for t in tasks} == {config.policy.id}
