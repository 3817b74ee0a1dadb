"""A trainer of several processes learns what one process learns, and its parts are those of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_ranks import on_processes
from trainer_world import make_sample, make_trajectory, tiny_model

from headrace.consumers.trainer.batch import Row, make_row
from headrace.consumers.trainer.model import load_model
from headrace.consumers.trainer.orders import decode_rows, encode_rows
from headrace.consumers.trainer.step import Learner
from headrace.schemas.config import TrainerConfig
from headrace.schemas.score import Ref
from headrace.schemas.weight_hash import set_hash

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
    made = learner(folder / "model", team)
    for step in range(3):
        # Rank 0 tells, the others hear: here each has the rows.
        if team.rank:
            team.broadcast(b"")
        result = made.step(rows(step * 12, 1 if step == 2 else 12))
    if team.rank:
        team.broadcast(b"")
    whole = made.weights_hash()
    held = {name: w.detach().numpy() for name, w in made.master.weights.items()}
    np.savez(folder / f"rank{team.rank}.npz", **held)
    (folder / f"said{team.rank}").write_text(json.dumps([whole, result.metrics]))


def test_the_rows_travel_bit_for_bit() -> None:
    given = rows(0, 5)
    for before, after in zip(given, decode_rows(encode_rows(given)), strict=True):
        for name in ("token_ids", "loss_mask", "behaviour", "advantages"):
            a, b = getattr(before, name), getattr(after, name)
            assert a.dtype == b.dtype and np.array_equal(a, b)
        assert before.temperature == after.temperature


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_learn_what_one_learns(tmp_path: Path, size: int) -> None:
    torch.set_num_threads(1)
    tiny_model(tmp_path / "model")
    on_processes(size, tmp_path, learn, tmp_path)
    alone = learner(tmp_path / "model")
    for step in range(3):
        expected = alone.step(rows(step * 12, 1 if step == 2 else 12))
    parts = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(size)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}
    for name, w in alone.master.weights.items():
        assert np.abs(joined[name] - w.detach().numpy()).max() < 2e-6
    said = {(tmp_path / f"said{rank}").read_text() for rank in range(size)}
    assert len(said) == 1
    whole, metrics = json.loads(said.pop())
    bits = {
        name: torch.from_numpy(v).bfloat16().view(torch.int16).numpy().view(np.uint16)
        for name, v in joined.items()
    }
    assert whole == set_hash(bits)
    assert metrics == pytest.approx(expected.metrics, rel=1e-3)
