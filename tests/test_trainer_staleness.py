"""max_lag 0: only the version being updated is trained; what waits across an update is dropped, and where it went stale told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams_records import a_score
from trainer_world import World, make_sample, make_trajectory

from headrace.consumers.trainer.builder import BatchBuilder
from headrace.producers.rollout.admission import Ledger
from headrace.schemas.config import StalenessConfig
from headrace.schemas.score import Ref
from headrace.streams.gate import is_too_stale


@pytest.fixture(scope="session")
def broker(best_broker: Any) -> Any:
    """One kind is enough here."""
    return best_broker


def test_the_gate_lets_pass_the_current_version_alone() -> None:
    for oldest, current, dropped in [(3, 3, False), (2, 3, True), (3, 4, True), (4, 3, False)]:
        score = a_score("r", version_min=oldest, version_max=max(oldest, 3))
        assert is_too_stale(score, current, max_lag=0) is dropped, (oldest, current)


def test_admission_has_room_for_the_batch_of_the_current_version_alone() -> None:
    book = Ledger(max_lag=0, batch_size=8, grace_ms=1000)
    book.start(f"r{i}" for i in range(8))
    assert not book.may_start(1)
    book.trained(1, [])
    for i in range(8):
        book.produced(f"r{i}", 0)
        book.sample(0, i, f"r{i}-0", f"r{i}", admitted=True)
    book.trained(1, [(0, 8)])
    assert book.capacity == 8


def test_stale_ones_are_told_apart_by_where_the_lag_arose() -> None:
    trajectory, ref = make_trajectory(np.random.default_rng(0), "t"), Ref(0, 0)
    builder = BatchBuilder(1, 0, {0: 0})

    def offer(offset: int, oldest: int, newest: int) -> None:
        sample = make_sample(dataclasses.replace(trajectory, trajectory_id=f"t{offset}"), ref)
        sample = dataclasses.replace(sample, version_min=oldest, version_max=newest)
        builder.offer(0, offset, sample)

    offer(0, 4, 4)  # waited across one update
    offer(1, 4, 5)  # an update came while it was sampled
    offer(2, 5, 5)
    batch = builder.take(5)
    assert batch is not None and [a.at.offset for a in batch.admitted] == [2]
    assert (batch.dropped, batch.stale_in_queue) == ({"stale": 2}, 1)


def test_a_sample_that_waits_across_one_update_is_dropped_at_the_trainer(
    broker: Any, namespace: str, tmp_path: Path
) -> None:
    world = World(broker.config, namespace, tmp_path)
    world.config = world.config.model_copy(update={"staleness": StalenessConfig(max_lag=0)})
    made = world.trajectories(24)
    world.samples([make_sample(t, ref, version=0) for t, ref in made[:16]], partition=0)
    world.samples([make_sample(t, ref, version=1) for t, ref in made[16:]], partition=0)
    world.run(steps=2)
    _, first, second = world.versions()
    assert [r.offset for r in first.samples] == list(range(8))
    assert [r.offset for r in second.samples] == list(range(16, 24))
    assert (dict(first.dropped), dict(second.dropped)) == ({}, {"stale": 8})
    assert (first.metrics["stale_in_queue"], second.metrics["stale_in_queue"]) == (0, 8)
    assert second.metrics["lag_max"] == 0
