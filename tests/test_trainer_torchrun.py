"""A trainer of two processes under torchrun: one record a version, each rank its part, and exact after a kill."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from trainer_world import POLICY, World, terminate

from headrace.consumers.trainer.history import History, load_bits
from headrace.consumers.trainer.step import make_learner
from headrace.schemas.weight_hash import set_hash
from headrace.schemas.weights import BlobKind
from headrace.streams.blobs import BlobStore

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="session")
def broker(best_broker: Any) -> Any:
    """One kind is enough here."""
    return best_broker


def check_chain(world: World) -> None:
    """Each version's weights, decoded from the blobs, are those that its record names."""
    assert world.config.policy.model is not None
    shapes = make_learner(world.config.policy.model, world.config.trainer).shapes
    versions = world.versions()
    history, store = History(versions), BlobStore(world.config.store_uri)
    for version in versions:
        assert set_hash(load_bits(history.chain(version.version), store, shapes)) == version.weights_hash


def ranks_of(torchrun: Any) -> list[psutil.Process]:
    """Its processes, by rank."""
    found = psutil.Process(torchrun.pid).children(recursive=True)
    return sorted((p for p in found if "RANK" in p.environ()), key=lambda p: int(p.environ()["RANK"]))


def test_two_ranks_killed_and_resumed_make_the_weights_of_two_never_killed(
    broker: Any, namespace: str, tmp_path: Path
) -> None:
    whole = World(broker.config, namespace + "a", tmp_path / "a")
    whole.feed(64, partition=0)
    log = whole.run(ranks=2, steps=8)
    assert "rank 1 of 2 follows" in log
    versions = whole.versions()
    assert [v.version for v in versions] == list(range(9))
    assert [len(v.blobs_of(BlobKind.DELTA)) for v in versions] == [0, *[2] * 8]
    assert [len(v.blobs_of(BlobKind.ANCHOR)) for v in versions] == [2, 0, 0, 0, 2, 0, 0, 0, 2]
    check_chain(whole)

    cut = World(broker.config, namespace + "b", tmp_path / "b")
    cut.feed(36, partition=0)  # enough for four steps: the checkpoint is of version 3, the log ends at 4
    trainer = cut.start(ranks=2, steps=8)
    cut.await_version(4, trainer)
    ranks_of(trainer)[1].send_signal(signal.SIGKILL)
    _, log = trainer.communicate(timeout=120)
    assert trainer.returncode != 0, log
    cut.feed(28, partition=0)
    log = cut.run(ranks=2, steps=8)
    assert "step redone from the log version=4" in log
    assert [v.weights_hash for v in cut.versions()] == [v.weights_hash for v in versions]


def test_another_number_of_ranks_goes_on_from_the_checkpoint(
    broker: Any, namespace: str, tmp_path: Path
) -> None:
    world = World(broker.config, namespace, tmp_path)
    world.feed(24, partition=0)
    trainer = world.start(ranks=2)
    world.await_version(3, trainer)
    log = terminate(trainer)
    made = len(world.versions())
    world.feed(16, partition=0)
    log = world.run(steps=made)
    assert "NO CHECKPOINT" not in log and "cannot be redone" not in log
    log = world.run(ranks=3, steps=made + 1)
    assert "NO CHECKPOINT" not in log and "cannot be redone" not in log
    assert [len(v.blobs_of(BlobKind.DELTA)) for v in world.versions()][-2:] == [1, 3]
    assert [v.version for v in world.versions()] == list(range(made + 2))
    check_chain(world)
    assert (world.config.run.dir / "checkpoints" / POLICY / f"v{made + 1:06d}").exists()
