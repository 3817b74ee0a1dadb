"""A trainer of several processes learns what one process learns, and its parts are those of the whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_ranks import on_processes
from trainer_world import make_sample, make_trajectory, tiny_model

from headrace.consumers.trainer.batch import Row, make_row
from headrace.consumers.trainer.checkpoint import CheckpointInfo, Checkpoints
from headrace.consumers.trainer.emit import Emitter
from headrace.consumers.trainer.follow import follow
from headrace.consumers.trainer.history import History, load_bits
from headrace.consumers.trainer.master import bf16_bits
from headrace.consumers.trainer.model import load_model
from headrace.consumers.trainer.orders import Order, decode_rows, encode_rows, tell
from headrace.consumers.trainer.step import Learner
from headrace.schemas.config import TrainerConfig
from headrace.schemas.errors import TeamError
from headrace.schemas.score import Ref
from headrace.schemas.weight_hash import set_hash
from headrace.schemas.weights import WEIGHTS
from headrace.streams.blobs import BlobStore

SETTINGS = {"lr": 1e-3, "warmup_steps": 2, "micro_batch_tokens": 64}


def rows(first: int, count: int = 12) -> list[Row]:
    made = []
    for i in range(first, first + count):
        rng = np.random.default_rng(i)
        trajectory = make_trajectory(rng, f"t{i}")
        made.append(make_row(trajectory, make_sample(trajectory, Ref(0, i), advantage=float(rng.normal()))))
    return made


def learner(directory: Path, team: Any = None) -> Learner:
    model = load_model(directory, dtype=torch.float32, device=torch.device("cpu"))
    return Learner(model, TrainerConfig(**SETTINGS), team)


def learn(team: Any, folder: Path) -> None:
    """Version 0 and three steps; rank 0 tells, the others follow. What each has at the end goes into files."""
    made, store = learner(folder / "model", team), BlobStore(str(folder / "blobs"))
    emitter = Emitter(store, "policy", anchor_every=2, team=team)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, team=team)
    if team.rank:
        follow(made, emitter, checkpoints, store)
    else:
        records = [emitter.encode(made.master)]
        emitter.settle()
        for step in range(3):
            result = made.step(rows(step * 12, 1 if step == 2 else 12))
            records.append(emitter.encode(made.master))
            emitter.settle()
        assert made.weights_hash() == emitter.weights_hash
        (folder / "metrics").write_text(json.dumps(result.metrics))
        for record in records:
            (folder / f"record{record.version}").write_bytes(WEIGHTS.encode(record))
        info = CheckpointInfo(version=3, weights_hash=emitter.weights_hash, consumed=(), config_hash="c")
        checkpoints.save(info, made.tensors())
        tell(team, Order.STOP)
    full = {name: p.full_tensor().bfloat16() for name, p in made.live.parameters.items()}
    if team.rank == 0:
        save_file(full, folder / "full.safetensors")


def test_the_rows_travel_bit_for_bit() -> None:
    given = rows(0, 5)
    for before, after in zip(given, decode_rows(encode_rows(given)), strict=True):
        for name in ("token_ids", "loss_mask", "behaviour", "advantages"):
            a, b = getattr(before, name), getattr(after, name)
            assert a.dtype == b.dtype and np.array_equal(a, b)
        assert before.temperature == after.temperature


def meet_the_dead(team: Any, folder: Path) -> None:
    team.exchange(b"here")
    if team.rank == 0:
        for message in (team.exchange, team.broadcast):
            with pytest.raises(TeamError, match="another rank is gone"):
                message(b"are you?" * 100)
        (folder / "told").touch()
    os._exit(0)


def test_a_rank_that_is_gone_is_told_at_once(tmp_path: Path) -> None:
    on_processes(2, tmp_path, meet_the_dead, tmp_path)
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_learn_what_one_learns(tmp_path: Path, size: int) -> None:
    torch.set_num_threads(1)
    tiny_model(tmp_path / "model")
    on_processes(size, tmp_path, learn, tmp_path)
    alone = learner(tmp_path / "model")
    for step in range(3):
        expected = alone.step(rows(step * 12, 1 if step == 2 else 12))
    metrics = json.loads((tmp_path / "metrics").read_text())
    assert metrics == pytest.approx(expected.metrics, rel=1e-3)

    (info,) = Checkpoints(tmp_path / "checkpoints", keep=1).infos()
    assert (info.version, info.ranks) == (3, size)
    joined = learner(tmp_path / "model")
    joined.load(Checkpoints(tmp_path / "checkpoints", keep=1).load(info), info.version)
    for name, w in alone.master.weights.items():
        assert (joined.master.weights[name] - w).abs().max() < 2e-6

    records = [WEIGHTS.decode((tmp_path / f"record{v}").read_bytes(), []) for v in range(4)]
    assert [len(r.blobs) for r in records] == [size, size, 2 * size, size]
    history, store = History(records), BlobStore(str(tmp_path / "blobs"))
    found = load_bits(history.chain(3), store, alone.shapes)
    full = {name: bf16_bits(t) for name, t in load_file(tmp_path / "full.safetensors").items()}
    assert set(found) == set(full) == set(alone.shapes)  # the tied head once, as the embedding
    for name, bits in full.items():
        assert np.array_equal(found[name], bits), name
        assert np.array_equal(joined.bits()[name], bits), name
    assert records[3].weights_hash == set_hash(full) == joined.weights_hash()
    assert [r.weights_hash for r in records] == [
        set_hash(load_bits(history.chain(v), store, alone.shapes)) for v in range(4)
    ]
