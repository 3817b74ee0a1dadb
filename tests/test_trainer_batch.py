"""Samples in log order become batches, and rows become padded micro-batches."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import TopicPartition

from headrace.consumers.trainer.batch import Row, collate, make_row, micro_batches, plan
from headrace.consumers.trainer.builder import Batch, BatchBuilder
from headrace.consumers.trainer.refs import KeptRecords, RefReader
from headrace.consumers.trainer.source import REMEMBER_RECORDS, open_source, remembered_records
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import BrokerError
from headrace.schemas.score import Ref

sys.path.insert(0, str(Path(__file__).parent))
from trainer_world import make_sample, make_trajectory


def row(length: int, trained: list[int], value: float = 1.0) -> Row:
    mask = np.zeros(length, dtype=bool)
    mask[trained] = True
    return Row(
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        loss_mask=mask,
        behaviour=np.where(mask, -0.5, 0.0).astype(np.float32),
        advantages=np.full(length, value, dtype=np.float32),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(16, 200))
def test_a_plan_holds_every_row_once_and_keeps_to_the_budget(lengths: list[int], budget: int) -> None:
    groups = plan(lengths, budget)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= budget
    assert groups == plan(list(lengths), budget)


def test_targets_are_predicted_by_the_position_before() -> None:
    batch = collate([row(3, [1, 2], 2.0), row(5, [4], -1.0)])
    assert batch.input_ids.tolist() == [[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]]
    assert batch.predictors.tolist() == [0, 1, 8]
    assert batch.targets.tolist() == [2, 3, 5]
    assert batch.advantages.tolist() == [2.0, 2.0, -1.0]
    assert batch.behaviour.tolist() == [-0.5] * 3


def test_a_first_token_is_never_trained() -> None:
    first = row(2, [0, 1])
    assert first.trained_tokens == 1
    assert collate([first]).targets.tolist() == [2]


def test_micro_batches_are_sorted_by_length() -> None:
    batches = micro_batches([row(9, [8]), row(2, [1]), row(3, [1])], budget=9)
    assert [b.lengths for b in batches] == [(2, 3), (9,)]


def test_a_row_takes_turn_advantages_and_the_temperature() -> None:
    trajectory = make_trajectory(np.random.default_rng(0), "a")
    sample = make_sample(trajectory, Ref(0, 0), advantage=3.0)
    assert set(make_row(trajectory, sample).advantages.tolist()) == {3.0}
    first, second = trajectory.turns
    per_turn = SimpleNamespace(advantage=3.0, turn_advantages=np.array([1.0, -1.0]))
    values = make_row(trajectory, per_turn).advantages  # type: ignore[arg-type]
    assert set(values[first.start : first.end].tolist()) == {1.0}
    assert set(values[second.start : second.end].tolist()) == {-1.0}


class Feed:
    """Samples offered in order, partition by partition."""

    def __init__(self, batch_size: int, max_lag: int = 4, positions: dict[int, int] | None = None) -> None:
        self.builder = BatchBuilder(batch_size, max_lag, positions or {0: 0, 1: 0})
        self._next = dict(positions or {0: 0, 1: 0})

    def __call__(self, name: str, partition: int = 0, *, version: int = 0, reason: str | None = None) -> None:
        trajectory = make_trajectory(np.random.default_rng(0), name)
        sample = make_sample(trajectory, Ref(0, 0), reason=reason, version=version)
        self.builder.offer(partition, self._next[partition], sample)
        self._next[partition] += 1

    def refuse(self, partition: int = 0) -> None:
        self.builder.refuse(partition, self._next[partition])
        self._next[partition] += 1


def names(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [a.sample.trajectory_id for a in batch.admitted]


def test_a_batch_takes_samples_in_the_order_in_which_they_came() -> None:
    feed = Feed(2)
    feed("a", 0)
    assert feed.builder.take(0) is None
    feed("b", 1)
    feed("c", 0)
    batch = feed.builder.take(0)
    assert names(batch) == ["a", "b"]
    assert batch is not None and batch.consumed == ((0, 1), (1, 1))
    assert [a.at for a in batch.admitted] == [Ref(0, 0), Ref(1, 0)]


def test_dropped_records_are_counted_with_the_batch_that_passes_them() -> None:
    feed = Feed(1)
    feed("a", reason="void")
    feed("b", reason="void")
    feed("c")
    feed("d", reason="zero_variance")
    first = feed.builder.take(0)
    assert names(first) == ["c"] and first is not None
    assert first.dropped == {"void": 2} and first.consumed == ((0, 3), (1, 0))
    feed("e")
    second = feed.builder.take(0)
    assert second is not None and second.dropped == {"zero_variance": 1} and second.consumed[0] == (0, 5)


def test_the_lag_limit_is_applied_to_the_version_being_updated() -> None:
    feed = Feed(1, max_lag=4)
    feed("old", version=2)
    feed("just", version=3)
    feed("new", version=7)
    batch = feed.builder.take(7)
    assert names(batch) == ["just"] and batch is not None
    assert batch.dropped == {"stale": 1} and batch.admitted[0].lag.total == 4
    last = feed.builder.take(7)
    assert last is not None and last.admitted[0].lag.total == 0


def test_what_went_stale_while_it_waited_does_not_count_towards_a_batch() -> None:
    feed = Feed(2, max_lag=1)
    feed("a", version=0)
    feed("b", version=2)
    assert feed.builder.take(2) is None
    feed("c", version=2)
    batch = feed.builder.take(2)
    assert names(batch) == ["b", "c"] and batch is not None and batch.dropped == {"stale": 1}


def test_repeats_are_dropped_wherever_the_first_is() -> None:
    feed = Feed(1)
    feed("a", 0)
    feed("a", 1)
    feed("b", 0)
    assert names(feed.builder.take(0)) == ["a"]
    feed("a", 0)
    batch = feed.builder.take(0)
    assert names(batch) == ["b"] and batch is not None and batch.dropped == {"duplicate": 1}
    feed.builder.remember("c")
    feed("c")
    feed("d")
    last = feed.builder.take(0)
    assert names(last) == ["d"] and last is not None and last.dropped == {"duplicate": 2}


def test_records_below_the_position_are_ignored_and_refused_ones_passed_over() -> None:
    feed = Feed(1, positions={0: 5})
    feed.builder.offer(0, 4, make_sample(make_trajectory(np.random.default_rng(0), "x"), Ref(0, 0)))
    assert feed.builder.waiting == 0
    feed.refuse()
    feed("a")
    batch = feed.builder.take(0)
    assert names(batch) == ["a"] and batch is not None and batch.consumed == ((0, 7),) and not batch.dropped


class Log:
    """A consumer over a list of offsets of partition 0, ten records a poll, with real retention and an end."""

    def __init__(self, offsets: list[int]) -> None:
        self.offsets = offsets
        self.seeks: list[int] = []
        self._assigned: list[TopicPartition] = []
        self._position = 0

    def assignment(self) -> set[TopicPartition]:
        return set(self._assigned)

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._assigned = partitions

    def position(self, tp: TopicPartition) -> int:
        return self._position

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.seeks.append(offset)
        inside = self.offsets[0] <= offset <= self.offsets[-1] + 1
        self._position = offset if inside else self.offsets[0]

    def pause(self, *tps: TopicPartition) -> None: ...

    def resume(self, *tps: TopicPartition) -> None: ...

    def poll(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        found = [o for o in self.offsets if o >= self._position][:10]
        if not found:
            return {}
        self._position = found[-1] + 1
        return {self._assigned[0]: [SimpleNamespace(offset=o, value=b"v") for o in found]}

    def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self.offsets[0] for tp in tps}

    def end_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return {tp: self.offsets[-1] + 1 for tp in tps}


def reader(log: Log) -> RefReader:
    clock = iter(range(10**9))
    return RefReader(KafkaConfig(), "topic", client_id="", now=lambda: next(clock) * 0.01, consumer=log)


def fetched(made: RefReader, offsets: list[int]) -> list[int]:
    return sorted(r.offset for r in made.fetch(Ref(0, o) for o in offsets))


def test_a_run_of_near_offsets_costs_one_seek_and_later_runs_none() -> None:
    log = Log(list(range(100)))
    made = reader(log)
    assert fetched(made, [20, 22, 31]) == [20, 22, 31]
    assert fetched(made, [21, 33, 45, 60]) == [21, 33, 45, 60]
    assert log.seeks == [20]


def test_only_what_the_log_does_not_hold_is_left_out() -> None:
    log = Log([*range(10, 20), *range(25, 40)])
    assert fetched(reader(log), [3, 12, 22, 30, 4000]) == [12, 30]


def test_a_silent_broker_is_an_error_not_a_missing_payload() -> None:
    log = Log(list(range(10)))
    log.poll = lambda timeout_ms: {}  # type: ignore[method-assign]
    with pytest.raises(BrokerError, match="1 records of topic did not arrive"):
        fetched(reader(log), [5])


def test_kept_records_are_bounded() -> None:
    kept = KeptRecords(limit=10)
    for i in range(5):
        kept.put(Ref(0, i), SimpleNamespace(value=b"1234"))
    assert [kept.pop(Ref(0, i)) is not None for i in range(5)] == [False, False, False, True, True]


def test_repeats_are_remembered_as_far_back_as_one_could_still_be_trained() -> None:
    assert remembered_records(batch_size=128, max_lag=4) == REMEMBER_RECORDS
    assert remembered_records(batch_size=4096, max_lag=4) == 2 * 6 * 4096


class FinishedLog:
    """A consumer of partitions whose every record was finished with."""

    def __init__(self, partitions: int, records: int) -> None:
        self._partitions, self._records = partitions, records
        self._assigned: list[TopicPartition] = []
        self._positions: dict[TopicPartition, int] = {}

    def partitions_for_topic(self, topic: str) -> set[int]:
        return set(range(self._partitions))

    def assign(self, tps: list[TopicPartition]) -> None:
        self._assigned = tps

    def beginning_offsets(self, tps: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(tps, 0)

    def committed(self, tp: TopicPartition) -> int:
        return self._records

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self._positions[tp] = offset

    def position(self, tp: TopicPartition) -> int:
        return self._positions[tp]

    def poll(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        (tp,) = self._assigned
        at, self._positions[tp] = self._positions[tp], self._records
        name = "{}-{}".format
        return {
            tp: [
                SimpleNamespace(offset=n, headers=[("trajectory", name(tp.partition, n).encode())])
                for n in range(at, self._records)
            ]
        }


def test_at_a_start_no_partition_pushes_out_what_another_one_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.consumers.trainer.source.REMEMBERED", 100)
    consumer: Any = FinishedLog(partitions=3, records=100)
    source = open_source(consumer, "samples", batch_size=1, max_lag=0, finished={})
    assert len(source._builder._seen) == 300
