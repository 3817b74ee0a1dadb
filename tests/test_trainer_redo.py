"""Redo is exact: a trainer killed at any point of a step, over and over, makes the weights of one never killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_kills import POINTS
from trainer_world import POLICY, World

from headrace.consumers.trainer.payloads import Payloads
from headrace.consumers.trainer.refs import RefReader
from headrace.consumers.trainer.sample_list import samples_of
from headrace.consumers.trainer.step import make_learner
from headrace.schemas import topics as t
from headrace.schemas.config_file import dump_config
from headrace.schemas.sample import SAMPLE
from headrace.schemas.weight_hash import set_hash
from headrace.streams.blobs import BlobStore


@pytest.fixture(scope="session")
def broker(best_broker: Any) -> Any:
    """One kind is enough here."""
    return best_broker


SCRIPT = Path(__file__).parent / "trainer_kills.py"


def uninterrupted(world: World) -> list[int]:
    """The hash of each version's weights, made in one go from the sample lists in the log."""
    config, topics = world.config, world.topics
    assert config.policy.model is not None
    samples = RefReader(config.kafka, topics.name(t.SAMPLES, POLICY), client_id="samples")
    store = BlobStore(config.store_uri)
    trajectories = RefReader(config.kafka, topics.name(t.TRAJECTORIES), client_id="payloads")
    payloads = Payloads(trajectories, store)
    learner = make_learner(config.policy.model, config.trainer)
    hashes = [set_hash(learner.bits())]
    for version in world.versions()[1:]:
        refs = samples_of(version, store)
        raw = samples.fetch(refs)
        rows = payloads.rows([SAMPLE.decode(raw[r].value, raw[r].headers) for r in refs])
        learner.step([row for row in rows if row is not None])
        hashes.append(set_hash(learner.bits()))
    samples.close()
    payloads.close()
    return hashes


def killed_at(world: World, point: str, nth: int, *more: str) -> tuple[int, str]:
    """A trainer that dies at the `nth` call of `point`: its exit status and log."""
    path = world.config.run.dir / "config.json"
    dump_config(world.config, path)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(path), point, str(nth), *more], stderr=subprocess.PIPE, text=True
    )
    _, log = process.communicate(timeout=120)
    return process.returncode, log


def check(world: World, steps: int, logs: list[str]) -> None:
    versions = world.versions()
    assert [v.version for v in versions] == list(range(steps + 1))
    assert [v.weights_hash for v in versions] == uninterrupted(world)
    refs = [ref for v in versions for ref in v.samples]
    assert len(refs) == len(set(refs)) == steps * world.config.trainer.batch_size
    assert world.committed() == dict(versions[-1].consumed)
    assert not any("cannot be redone" in log or "NO CHECKPOINT" in log for log in logs)


def kill_and_go_on(broker: Any, namespace: str, folder: Path, plan: list[tuple[str, int]], steps: int) -> str:
    """`steps` steps with a kill for each (point, nth) of the plan; all logs."""
    world = World(broker.config, namespace, folder, steps=steps)
    world.feed(steps * world.config.trainer.batch_size)
    logs = []
    for point, nth in plan:
        status, log = killed_at(world, point, nth)
        assert status == -signal.SIGKILL, f"{point} {nth}: {log}"
        logs.append(log)
    logs.append(world.run())
    check(world, steps, logs)
    return "".join(logs)


def test_kills_before_in_and_after_a_step_leave_no_trace_in_the_weights(
    broker: Any, namespace: str, tmp_path: Path
) -> None:
    plan = [("offsets", 2), ("checkpoint", 2), ("optimizer", 2)]
    log = kill_and_go_on(broker, namespace, tmp_path, plan, steps=7)
    assert "step redone from the log" in log


def test_training_goes_on_when_a_checkpoint_finds_the_disk_full_and_a_restart_redoes_more(
    broker: Any, namespace: str, tmp_path: Path
) -> None:
    world = World(broker.config, namespace, tmp_path, steps=8)
    world.feed(40)
    status, log = killed_at(world, "full", 2, "die-at-version-5")
    assert status == -signal.SIGKILL, log
    assert "checkpoint of version 3 cannot be written" in log and "training goes on" in log
    world.feed(24)
    again = world.run()
    assert "step redone from the log version=1\n" in again and "step redone from the log version=5\n" in again
    check(world, 8, [log, again])
    left = sorted(p.name for p in (tmp_path / "checkpoints" / POLICY).iterdir())
    assert left == ["v000006", "v000008"]


@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1] if "HEADRACE_STORM_SEEDS" in os.environ else [0])
def test_twenty_kills_at_random_points_of_thirty_steps(
    kafka_broker: Any, namespace: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    kills = sorted(POINTS.keys() - {"full"})
    points = kills + rng.sample(kills, 20 - len(kills))
    rng.shuffle(points)
    plan = [(point, rng.randint(1, 2 if point in SELDOM else 3)) for point in points]
    log = kill_and_go_on(kafka_broker, namespace, tmp_path, plan, steps=30)
    assert "step redone from the log" in log
    print(f"\nseed={seed} kills={len(plan)} steps redone={log.count('step redone from the log')}")


SELDOM = {"checkpoint", "renaming", "renamed", "removing"}
"""Calls that one process makes every third step at most."""
