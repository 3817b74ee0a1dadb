"""Checkpoints are whole or absent, hold no code, and a resumed learner is the one that was saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_ranks import on_threads

from headrace.consumers.trainer import checkpoint
from headrace.consumers.trainer.checkpoint import CheckpointInfo, Checkpoints
from headrace.consumers.trainer.history import KEPT, History
from headrace.consumers.trainer.resume import config_hash, usable
from headrace.consumers.trainer.shards import cut, part
from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import WeightUpdateError
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord

sys.path.insert(0, str(Path(__file__).parent))


def info(version: int, weights_hash: int = 7) -> CheckpointInfo:
    return CheckpointInfo(
        version=version, weights_hash=weights_hash, consumed=((0, 3), (1, 2**40)), config_hash="c"
    )


def record(version: int, *kinds: BlobKind, weights_hash: int = 7) -> WeightRecord:
    return WeightRecord(
        policy_id="policy",
        version=version,
        base_version=version - 1 if BlobKind.DELTA in kinds else None,
        base_hash=0,
        weights_hash=weights_hash,
        blobs=tuple(WeightBlob(kind=k, uri="x", size=1, sha256="0" * 64) for k in kinds),
    )


TENSORS = {"master/a": torch.arange(6.0).reshape(2, 3), "step/a": torch.tensor([3.0])}


def test_what_is_saved_is_loaded_bit_for_bit_with_the_random_generator(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    torch.manual_seed(5)
    checkpoints.save(info(3, 2**64 - 1), TENSORS)
    expected = torch.rand(3)
    (found,) = checkpoints.infos()
    assert found == info(3, 2**64 - 1)
    loaded = checkpoints.load(found)
    assert {n: t.tolist() for n, t in loaded.items()} == {n: t.tolist() for n, t in TENSORS.items()}
    assert torch.equal(torch.rand(3), expected)


def test_any_number_of_ranks_loads_what_any_other_wrote(tmp_path: Path) -> None:
    whole = {"master/a": torch.randn(7, 3), "master/b": torch.randn(2), "exp_avg/a": torch.randn(7, 3)}
    steps = {"step/a": torch.tensor([3.0]), "step/b": torch.tensor([3.0])}
    spans = {name: tuple(t.shape) for name, t in whole.items()}

    def save(team: Any) -> None:
        if team.rank:
            team.broadcast(b"")  # the order
        rows = {name: part(t, cut(spans, team.rank, team.size)[name]) for name, t in whole.items()}
        Checkpoints(tmp_path, keep=2, team=team).save(info(1), rows | steps)

    def load(team: Any) -> dict[str, torch.Tensor]:
        if team.rank:
            team.broadcast(b"")
        checkpoints = Checkpoints(tmp_path, keep=2, team=team)
        (found,) = checkpoints.infos()
        return checkpoints.load(found)

    for writers in (1, 3):
        assert on_threads(writers, save) == [None] * writers
        assert Checkpoints(tmp_path, keep=2).infos()[0].ranks == writers
        for readers in (1, 2, 3, 5):
            parts = on_threads(readers, load)
            for name, tensor in whole.items():
                assert torch.equal(torch.cat([p[name] for p in parts]), tensor)
            assert all(torch.equal(p[name], t) for p in parts for name, t in steps.items())


def test_a_rank_that_cannot_write_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = checkpoint.save_file

    def full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "state-001" in path.name:
            raise OSError("no room")
        written(tensors, path)

    def save(team: Any) -> None:
        if team.rank:
            team.broadcast(b"")
        Checkpoints(tmp_path, keep=2, team=team).save(info(1), TENSORS)

    monkeypatch.setattr(checkpoint, "save_file", full)
    failed = on_threads(2, save)
    assert [type(e) for e in failed] == [OSError, OSError]
    assert [str(e) for e in failed] == ["rank 1 failed: no room", "no room"]
    assert Checkpoints(tmp_path, keep=2).infos() == []
    monkeypatch.undo()
    assert on_threads(2, save) == [None, None]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (0, 20, 1_000_000, 40):
        checkpoints.save(info(version), TENSORS)
    assert [i.version for i in checkpoints.infos()] == [1_000_000, 40]


def test_fewer_than_may_be_kept_are_all_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=6)
    for version in range(8):
        checkpoints.save(info(version), {"x": torch.ones(1)})
        assert [i.version for i in checkpoints.infos()] == list(range(version, max(-1, version - 6), -1))


def test_a_checkpoint_can_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(info(1, 1), TENSORS)
    checkpoints.save(info(1, 2), TENSORS)
    assert [i.weights_hash for i in checkpoints.infos()] == [2]


def test_a_torn_write_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(info(1), TENSORS)
    (tmp_path / "v000002.part").mkdir()
    (tmp_path / "v000002.part" / "state.safetensors").write_bytes(b"half")
    (tmp_path / "v000003").mkdir()
    (tmp_path / "v000003" / "meta.json").write_text("{")
    assert [i.version for i in checkpoints.infos()] == [1]
    checkpoints.save(info(4), TENSORS)
    assert not (tmp_path / "v000002.part").exists()


def test_a_death_between_the_old_one_and_the_new_one_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(info(1, 1), TENSORS)
    rename, renames = Path.rename, []

    def die_at_the_second(self: Path, target: Path) -> Path:
        renames.append(self)
        if len(renames) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(info(1, 2), TENSORS)
    monkeypatch.undo()
    assert [i.weights_hash for i in Checkpoints(tmp_path, keep=1).infos()] == [1]
    checkpoints.save(info(1, 3), TENSORS)
    assert [i.weights_hash for i in checkpoints.infos()] == [3]
    assert [p.name for p in tmp_path.iterdir()] == ["v000001"]


def test_checkpoints_of_another_log_are_set_aside_and_push_out_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (100, 120):
        checkpoints.save(info(version), TENSORS)
    checkpoints.set_aside(checkpoints.infos())
    for version in (0, 20):
        checkpoints.save(info(version), TENSORS)
    assert [i.version for i in checkpoints.infos()] == [20, 0]
    assert sorted(p.name for p in tmp_path.glob("*.other")) == ["v000100.other", "v000120.other"]


def test_the_one_just_written_is_never_pruned(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for version in (100, 5):
        checkpoints.save(info(version), TENSORS)
    assert [i.version for i in checkpoints.infos()] == [5]


def test_a_broken_file_says_so(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    folder = checkpoints.save(info(1), TENSORS)
    (folder / "state.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        checkpoints.load(info(1))


def test_only_checkpoints_that_the_log_agrees_with_are_used() -> None:
    history = History([record(v, BlobKind.DELTA, weights_hash=v) for v in range(1, 6)])
    infos = [info(9, 9), info(4, 4), info(3, 99), info(2, 2)]
    assert [i.version for i in usable(infos, history)] == [4, 2]


def test_a_chain_starts_at_the_newest_anchor_below() -> None:
    both = (BlobKind.DELTA, BlobKind.ANCHOR)
    records = [
        record(0, BlobKind.ANCHOR),
        record(1, BlobKind.DELTA),
        record(2, *both),
        record(3, BlobKind.DELTA),
    ]
    history = History(records)
    assert [r.version for r in history.chain(3)] == [2, 3]
    assert [r.version for r in history.chain(1)] == [0, 1]
    with pytest.raises(WeightUpdateError, match="gap"):
        History([records[0], records[3]]).chain(3)


def test_a_long_log_keeps_what_is_needed_to_load_the_newest() -> None:
    both = (BlobKind.DELTA, BlobKind.ANCHOR)
    history = History(record(v, *(both if v % 50 == 0 else both[:1])) for v in range(1, KEPT + 500))
    assert history.get(1) is None
    assert next(r.version for r in history.chain(KEPT + 499)) == KEPT + 450


def test_the_settings_hash_covers_the_arithmetic_and_nothing_else() -> None:
    base = config_hash(TrainerConfig())
    assert config_hash(TrainerConfig(lr=2e-6)) != base
    assert config_hash(TrainerConfig(threads=2)) != base
    assert config_hash(TrainerConfig(checkpoint_every=7, keep_checkpoints=9, steps=5)) == base
