"""The trainer as a process on a broker: a chain that anyone can follow, offsets in the same transaction, takeover."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.consumers.trainer.history import History, load_bits
from headrace.consumers.trainer.role import FENCED_STATUS
from headrace.schemas import topics as t
from headrace.schemas.deadletter import read_dead_letter
from headrace.schemas.score import Ref
from headrace.schemas.weight_hash import set_hash
from headrace.streams.blobs import BlobStore

sys.path.insert(0, str(Path(__file__).parent))
from trainer_world import POLICY, World, make_sample, terminate


@pytest.fixture(scope="session")
def broker(best_broker: Any) -> Any:
    """One kind is enough here."""
    return best_broker


@pytest.fixture
def world(broker: Any, namespace: str, tmp_path: Path) -> World:
    return World(broker.config, namespace, tmp_path)


def chain_hashes(world: World) -> list[int]:
    """The hash of each version's weights, decoded from the blobs."""
    versions = world.versions()
    store = BlobStore(world.config.store_uri)
    history = History(versions)
    first = load_bits(history.chain(0), store, anchor_shapes(world))
    shapes = {name: bits.shape for name, bits in first.items()}
    return [set_hash(load_bits(history.chain(v.version), store, shapes)) for v in versions]


def anchor_shapes(world: World) -> dict[str, tuple[int, ...]]:
    from headrace.consumers.trainer.step import make_learner

    assert world.config.policy.model is not None
    return {
        n: b.shape for n, b in make_learner(world.config.policy.model, world.config.trainer).bits().items()
    }


def test_every_version_follows_from_the_log(world: World) -> None:
    samples = world.feed(40)
    log = world.run(steps=5)

    versions = world.versions()
    assert [v.version for v in versions] == [0, 1, 2, 3, 4, 5], log
    assert [v.has_anchor for v in versions] == [True, False, False, False, True, False]
    assert [v.has_delta for v in versions] == [False, True, True, True, True, True]
    assert chain_hashes(world) == [v.weights_hash for v in versions]
    assert len({v.weights_hash for v in versions}) == 6
    assert [len(v.samples) for v in versions[1:]] == [8] * 5
    assert len({ref for v in versions for ref in v.samples}) == len(samples)
    assert world.committed() == dict(versions[-1].consumed)
    assert sum(dict(versions[-1].consumed).values()) == 40
    assert versions[-1].metrics["samples"] == 8
    assert {"reward_mean", "lag_max", "entropy", "ess", "mismatch_kl", "grad_norm", "mfu"} <= set(
        versions[-1].metrics
    )


def test_what_is_not_trained_is_counted_by_reason(world: World) -> None:
    made = world.trajectories(20)
    admitted = [make_sample(trajectory, ref) for trajectory, ref in made[:9]]
    dropped = [make_sample(trajectory, ref, reason="zero_variance") for trajectory, ref in made[9:12]]
    missing = make_sample(made[12][0], Ref(made[12][1].partition, 10_000))
    another = make_sample(made[13][0], made[14][1])
    world.samples([*dropped, *admitted[:4], missing, admitted[0], admitted[1], another, *admitted[4:]])
    world.producer.send(world.topics.name(t.SAMPLES, POLICY), b"not a record", partition=0)
    world.producer.flush()
    world.feed(8)
    world.run(steps=2)

    versions = world.versions()
    total: dict[str, int] = {}
    for version in versions:
        for reason, count in version.dropped.items():
            total[reason] = total.get(reason, 0) + count
    trained = sum(len(v.samples) for v in versions)
    letters = world.read(world.topics.name(t.DEADLETTERS))
    finished = sum(offset for _, offset in versions[-1].consumed)
    assert trained + sum(total.values()) + len(letters) == finished
    assert total == {"zero_variance": 3, "duplicate": 2, "payload": 2}
    letter = read_dead_letter(letters[0].headers)
    assert (letter.stage, letter.partition, letter.reason) == ("trainer", 0, "not_arrow")
    assert letters[0].value == b"not a record"


def test_killed_and_resumed_gives_the_same_bits_as_never_killed(
    broker: Any, namespace: str, tmp_path: Path
) -> None:
    whole = World(broker.config, namespace + "a", tmp_path / "a")
    whole.feed(64, partition=0)
    whole.run(steps=8)

    cut = World(broker.config, namespace + "b", tmp_path / "b")
    cut.feed(36, partition=0)  # enough for four steps: the checkpoint is of version 3, the log ends at 4
    trainer = cut.start(steps=8)
    cut.await_version(4, trainer)
    trainer.kill()
    trainer.communicate()
    cut.feed(28, partition=0)
    log = cut.run(steps=8)

    assert "step redone from the log version=4" in log
    assert trained(cut) == trained(whole) == [(0, offset) for offset in range(64)]
    assert [v.weights_hash for v in cut.versions()] == [v.weights_hash for v in whole.versions()]
    assert chain_hashes(cut) == [v.weights_hash for v in cut.versions()]


def trained(world: World) -> list[tuple[int, int]]:
    """(partition, offset) of every trained sample, in order."""
    return [(r.partition, r.offset) for v in world.versions() for r in v.samples]


def test_a_second_trainer_fences_the_first(world: World) -> None:
    world.feed(12)
    first = world.start()
    world.await_version(1, first)
    second = world.start()
    try:
        assert second.stderr is not None
        for line in second.stderr:
            if "trainer ready" in line:
                break
        world.feed(12)
        world.await_version(2, second)
        _, log = first.communicate(timeout=60)
        assert first.returncode == FENCED_STATUS, log
        assert "another trainer has taken over policy 'policy'" in log
        assert "Traceback" not in log
    finally:
        first.kill()
        terminate(second)
    versions = world.versions()
    assert [v.version for v in versions] == list(range(len(versions)))
    assert len(trained(world)) == len(set(trained(world)))


def test_without_a_checkpoint_it_goes_on_from_the_log(world: World) -> None:
    world.feed(24)
    world.run(steps=2)
    shutil.rmtree(world.config.run.dir / "checkpoints")
    log = world.run(steps=3)
    assert "NO CHECKPOINT" in log
    assert chain_hashes(world) == [v.weights_hash for v in world.versions()]
    assert [v.version for v in world.versions()] == [0, 1, 2, 3]


def test_a_step_that_comes_out_differently_is_said_and_anchored(world: World) -> None:
    world.feed(32)
    trainer = world.start(steps=2)
    trainer.communicate(timeout=120)
    saved = world.config.run.dir / "checkpoints" / POLICY / "v000002"
    assert saved.exists()
    shutil.rmtree(saved)  # the newest left is version 0: steps 1 and 2 must be redone
    log = world.run(steps=4, lr=2e-3)
    versions = world.versions()
    assert "cannot be redone: version 1 was made with other settings" in log
    assert [v.version for v in versions] == [0, 1, 2, 3, 4]
    assert versions[3].has_anchor and not versions[3].has_delta
    assert versions[3].weights_hash == versions[2].weights_hash
    assert versions[3].consumed == versions[2].consumed
    assert chain_hashes(world) == [v.weights_hash for v in versions]


def test_sigterm_finishes_and_saves(world: World) -> None:
    world.feed(16)
    trainer = world.start()
    world.await_version(2, trainer)
    log = terminate(trainer)
    assert trainer.returncode == 0, log
    assert (world.config.run.dir / "checkpoints" / POLICY / "v000002").exists()
    assert np.isfinite(world.versions()[-1].metrics["loss"])


def test_a_version_that_cannot_be_stored_is_not_published_and_the_reason_is_told(world: World) -> None:
    world.feed(24)
    world.run(steps=2)
    folder, away = (world.config.run.dir / "blobs" / "weights" / name for name in (POLICY, "away"))
    folder.rename(away)
    folder.write_text("a file where the folder should be")
    trainer = world.start(steps=3)
    _, log = trainer.communicate(timeout=120)
    assert trainer.returncode != 0
    assert log.count("not stored, again in") == 4 and "BlobError: blob weights/policy/v000003-delta" in log
    assert [record.version for record in world.versions()] == [0, 1, 2]
    assert world.committed() == dict(world.versions()[-1].consumed)
    folder.unlink()
    away.rename(folder)
    world.run(steps=3)
    assert chain_hashes(world) == [record.weights_hash for record in world.versions()]
    assert [record.version for record in world.versions()] == [0, 1, 2, 3]


def test_a_checkpoint_that_cannot_be_written_is_said_and_training_goes_on(world: World) -> None:
    folder = world.config.run.dir / "checkpoints"
    folder.mkdir()
    (folder / POLICY).write_text("a file where the folder should be")
    world.feed(32)
    log = world.run(steps=4)
    assert "checkpoint of version 3 cannot be written" in log and "training goes on" in log
    assert [record.version for record in world.versions()] == [0, 1, 2, 3, 4]
