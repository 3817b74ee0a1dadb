"""The whole loop in processes: `headrace demo` on both brokers, what it leaves in the log, and that it leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.deploy.presets import CALCULATOR
from headrace.schemas.config import Config, RunConfig
from headrace.schemas.engine import ENGINE
from headrace.schemas.sample import SAMPLE, Fate
from headrace.schemas.topics import DEADLETTERS, ENGINES, SAMPLES, TRAJECTORIES, WEIGHTS, Topics
from headrace.schemas.trajectory import TRAJECTORY, TrajectoryStatus
from headrace.schemas.weights import WEIGHTS as WEIGHT_RECORD
from headrace.streams.kafka import closing, make_consumer, partitions_of

pytestmark = pytest.mark.e2e

HEADRACE = [sys.executable, "-m", "headrace.deploy.cli"]
STEPS = 6
BATCH = CALCULATOR.settings["trainer.batch_size"]
SUMMARY = {
    "task", "seed", "steps", "seconds", "reward_start", "reward_end", "policy_version", "trajectories", "trained",
    "dropped", "lag_mean", "lag_max", "updates", "pause_ms_p50", "pause_ms_max", "tokens_per_second", "delta_bytes",
    "full_bytes",
}  # fmt: skip


def records(config: Any, topic: str) -> list[Any]:
    """Everything that readers of committed transactions see of `topic`."""
    found: list[Any] = []
    with closing(make_consumer(config, client_id="test")) as consumer:
        partitions = partitions_of(consumer, topic)
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        while any(consumer.position(p) < ends[p] for p in partitions):
            for batch in consumer.poll(200).values():
                found += batch
    return found


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Live processes that name the run's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(run_dir) in part for part in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def finished(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A demo of a few steps on a broker that outlives it."""
    run_dir = tmp_path_factory.mktemp(f"demo-{broker.kind}")
    namespace = f"demo-{run_dir.name}"
    overrides = [
        f"run.namespace={namespace}",
        f"kafka.static_members={json.dumps(broker.config.static_members)}",
    ]
    command = [*HEADRACE, "demo", "--steps", str(STEPS), "--json", "--bootstrap", broker.bootstrap]
    command += ["--run-dir", str(run_dir), *(part for o in overrides for part in ("--set", o))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {"run_dir": run_dir, "summary": json.loads(done.stdout.splitlines()[-1]), "config": broker.config,
            "topics": Topics(namespace)}  # fmt: skip


def test_summary_is_complete_and_consistent(finished: dict[str, Any]) -> None:
    summary = finished["summary"]
    assert summary.keys() >= SUMMARY
    assert summary["policy_version"] == summary["steps"] == STEPS
    assert summary["trained"] == STEPS * BATCH
    assert summary["trajectories"] >= summary["trained"]
    assert summary["delta_bytes"] > 0
    assert 0 < summary["updates"] <= STEPS


def test_rollouts_are_in_flight_while_the_trainer_steps(finished: dict[str, Any]) -> None:
    assert 1 <= finished["summary"]["lag_max"] <= 4


def test_the_chain_has_every_version_once_and_engines_hold_the_trainers_bits(
    finished: dict[str, Any],
) -> None:
    config, topics = finished["config"], finished["topics"]
    chain = [WEIGHT_RECORD.decode(r.value, r.headers) for r in records(config, topics.name(WEIGHTS, "demo"))]
    assert [w.version for w in chain] == list(range(STEPS + 1))
    hashes = {w.version: w.weights_hash for w in chain}
    acks = [ENGINE.decode(r.value, r.headers) for r in records(config, topics.name(ENGINES))]
    applied = {a.version: a.weights_hash for a in acks if a.weights_hash is not None and a.version >= 0}
    assert applied, "no engine acknowledged an update"
    assert all(applied[v] == hashes[v] for v in applied)


def test_every_trained_sample_is_admitted_and_trained_once(finished: dict[str, Any]) -> None:
    config, topics = finished["config"], finished["topics"]
    samples = {
        (r.partition, r.offset): SAMPLE.decode(r.value, r.headers)
        for r in records(config, topics.name(SAMPLES, "demo"))
    }
    trained = [
        samples[ref.partition, ref.offset]
        for r in records(config, topics.name(WEIGHTS, "demo"))
        for ref in WEIGHT_RECORD.decode(r.value, r.headers).samples
    ]
    assert len(trained) == STEPS * BATCH
    assert len({s.trajectory_id for s in trained}) == len(trained)
    assert all(s.fate is Fate.ADMITTED for s in trained)


def test_trajectories_are_valid_and_none_was_lost_to_an_update(finished: dict[str, Any]) -> None:
    config, topics = finished["config"], finished["topics"]
    trajectories = [TRAJECTORY.decode(r.value, r.headers) for r in records(config, topics.name(TRAJECTORIES))]
    assert len({t.trajectory_id for t in trajectories}) == len(trajectories)
    by_end = [t for t in trajectories if t.status is TrajectoryStatus.ABORTED and t.reason != "shutdown"]
    assert not by_end, by_end[0].reason
    assert not records(config, topics.name(DEADLETTERS))


def test_nothing_is_left_running_and_the_plot_is_there(finished: dict[str, Any]) -> None:
    assert not processes_of(finished["run_dir"])
    assert (finished["run_dir"] / "plot.png").stat().st_size > 10_000


def test_status_reads_the_finished_run(finished: dict[str, Any]) -> None:
    from headrace.streams.status import snapshot

    config = Config.model_validate(
        {
            "run": RunConfig(namespace=finished["topics"].namespace),
            "kafka": finished["config"],
            "policy": {"id": "demo"},
        }
    )
    status = snapshot(config)
    assert status.version == STEPS
    assert {s.stage for s in status.stages} == {"verify", "advantage", "trainer", "engines"}


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_interrupt_stops_every_process(moment: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environment = {k: v for k, v in os.environ.items() if k != "KAFKA_HOME"}
    command = [*HEADRACE, "demo", "--json", "--run-dir", str(run_dir)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    marker = run_dir / "logs" / ("trainer.log" if moment == "training" else "broker.log")
    deadline = time.monotonic() + 120
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marker.exists()
    assert processes_of(run_dir)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr[-2000:]
    assert "Traceback" not in stderr
    assert not processes_of(run_dir)
