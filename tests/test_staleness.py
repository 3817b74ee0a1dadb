"""Lag: one definition, at the gate as everywhere."""

from __future__ import annotations

import pytest
from streams_records import a_score

from headrace.streams.gate import VersionBook, is_too_stale
from headrace.streams.staleness import admission_capacity, is_stale, lag_of


@pytest.mark.parametrize(("oldest", "lag", "stale"), [(7, 0, False), (3, 4, False), (2, 5, True)])
def test_lag_of_a_trainer_that_makes_version_8_from_7(oldest: int, lag: int, stale: bool) -> None:
    found = lag_of(current_version=7, version_min=oldest, version_max=7)
    assert found.total == lag
    assert is_stale(found, 4) is stale


def test_lag_splits_into_the_part_while_sampling_and_the_part_in_the_queue() -> None:
    found = lag_of(current_version=7, version_min=3, version_max=5)
    assert (found.in_flight, found.in_queue, found.total) == (2, 2, 4)


def test_an_engine_ahead_of_the_reader_has_no_negative_queue_time() -> None:
    assert lag_of(current_version=6, version_min=7, version_max=7).total == 0


@pytest.mark.parametrize(("oldest", "dropped"), [(7, False), (3, False), (2, True)])
def test_the_gate_drops_what_is_too_old(oldest: int, dropped: bool) -> None:
    score = a_score("r", version_min=oldest, version_max=oldest)
    assert is_too_stale(score, 7, max_lag=4) is dropped


def test_before_any_version_is_known_only_the_time_while_sampling_counts() -> None:
    assert not is_too_stale(a_score("r", version_min=3, version_max=7), None, max_lag=4)
    assert is_too_stale(a_score("r", version_min=2, version_max=7), None, max_lag=4)


def test_versions_never_go_back() -> None:
    book = VersionBook()
    assert book.current("p") is None
    for version in (0, 3, 2):
        book.observe("p", version)
    assert book.current("p") == 3
    assert book.current("q") is None


def test_admission_leaves_room_for_max_lag_batches() -> None:
    assert admission_capacity(max_lag=4, version=0, batch_size=16, accepted=0, running=0) == 80
    assert admission_capacity(max_lag=4, version=0, batch_size=16, accepted=70, running=10) == 0
    assert admission_capacity(max_lag=4, version=1, batch_size=16, accepted=70, running=10) == 16
