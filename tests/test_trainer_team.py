"""Ranks: who holds which rows, and a failure of one that reaches all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_ranks import on_threads

from headrace.consumers.trainer.shards import Span, cut, rows_of, span_of
from headrace.consumers.trainer.team import Alone, open_team, together
from headrace.schemas.errors import BlobError, ConfigError, TeamError


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_ranks_rows_are_torchs_chunks(rows: int, size: int) -> None:
    chunks = torch.arange(rows).chunk(size) if rows else ()
    held = [rows_of(rows, rank, size) for rank in range(size)]
    assert [list(range(*h)) for h in held] == [c.tolist() for c in chunks] + [[]] * (size - len(chunks))


def test_a_rank_without_rows_holds_nothing() -> None:
    shapes = {"a": (5, 2, 3), "b": (2,)}
    assert [cut(shapes, rank, 3) for rank in range(3)] == [
        {"a": Span((5, 2, 3), 0, 12), "b": Span((2,), 0, 1)},
        {"a": Span((5, 2, 3), 12, 12), "b": Span((2,), 1, 1)},
        {"a": Span((5, 2, 3), 24, 6), "b": Span((2,), 0, 0)},
    ]


def test_a_parameter_that_is_whole_on_every_rank_is_refused() -> None:
    assert span_of("w", torch.zeros(3, 4), 1) == Span((3, 4), 0, 12)
    with pytest.raises(ConfigError, match="fully_shard"):
        span_of("w", torch.zeros(3, 4), 2)


def test_what_fails_on_one_rank_fails_on_all() -> None:
    def work(rank: int) -> Callable[[], bytes]:
        def act() -> bytes:
            if rank == 1:
                raise BlobError("no room")
            return bytes([rank])

        return act

    assert together(Alone(), work(0)) == [b"\0"]
    results = on_threads(3, lambda team: together(team, work(team.rank)))
    assert isinstance(results[1], BlobError)
    assert [str(results[i]) for i in (0, 2)] == ["rank 1 failed: no room"] * 2
    assert all(isinstance(results[i], TeamError) for i in (0, 2))
    assert on_threads(2, lambda team: together(team, work(2 * team.rank))) == [[b"\0", b"\2"]] * 2


def test_without_torchrun_the_team_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (open_team().rank, open_team().size) == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="not a number"):
        open_team()
