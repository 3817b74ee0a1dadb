"""The admission ledger: the bound holds whatever is told in whatever order, and nothing waits for ever."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.producers.rollout.admission import Ledger


def ledger(max_lag: int = 4, batch: int = 8) -> Ledger:
    return Ledger(max_lag=max_lag, batch_size=batch, grace_ms=1000)


def test_capacity_is_what_the_formula_says() -> None:
    book = ledger(max_lag=1, batch=8)
    assert book.capacity == 16
    book.start(["a", "b", "c"])
    book.produced("a", 0)
    book.sample(0, 0, "a-0", "a", admitted=True)
    assert (book.running, book.unresolved, book.ahead, book.capacity) == (2, 0, 1, 13)
    book.trained(1, [(0, 1)])
    assert (book.ahead, book.capacity) == (0, 14)


def test_a_dropped_sample_and_a_dead_letter_free_their_place() -> None:
    book = ledger()
    book.start(["a", "b"])
    book.produced("a", 0)
    book.produced("b", 0)
    book.sample(0, 0, "a-0", "a", admitted=False)
    book.resolved("b")
    assert book.capacity == 40


def test_a_fate_may_come_before_the_acknowledgement() -> None:
    book = ledger()
    book.start(["a"])
    book.sample(0, 0, "a-0", "a", admitted=True)
    assert book.running == 1
    book.produced("a", 0)
    assert (book.running, book.unresolved, book.ahead) == (0, 0, 1)


def test_a_repeat_of_a_sample_is_not_counted_twice() -> None:
    book = ledger()
    for offset in range(3):
        book.sample(1, offset, "x-0", "x", admitted=True)
    assert book.ahead == 1


def test_what_was_consumed_before_it_was_read_is_not_ahead() -> None:
    book = ledger()
    book.trained(3, [(0, 10)])
    book.sample(0, 9, "x-0", "x", admitted=True)
    book.sample(0, 10, "y-0", "y", admitted=True)
    assert book.ahead == 1
    book.trained(2, [(0, 5)])  # an older record, read again
    assert (book.version, book.ahead) == (3, 1)


def test_a_rollout_without_a_fate_is_forgotten_after_deadline_and_grace() -> None:
    book = ledger()
    book.start(["a"])
    book.produced("a", 5000)
    assert book.forget(6000) == []
    assert book.forget(6001) == ["a"]
    assert (book.capacity, book.forgotten) == (40, 1)
    book.sample(0, 0, "a-0", "a", admitted=True)  # late after all
    assert book.ahead == 1


def test_a_group_larger_than_what_is_left_starts_where_the_trainer_would_starve() -> None:
    book = ledger(max_lag=0, batch=24)
    assert book.may_start(16)
    book.start(f"a{i}" for i in range(16))
    assert book.capacity == 8
    assert book.may_start(16)
    book.start(f"b{i}" for i in range(16))
    assert not book.may_start(16)


def test_other_workers_samples_take_their_share() -> None:
    book = ledger(max_lag=0, batch=8)
    for i in range(8):
        book.sample(0, i, f"other{i}-0", f"other{i}", admitted=True)
    assert not book.may_start(1)


class Pipeline(RuleBasedStateMachine):
    """A worker, a pipeline that repeats, reorders over partitions, drops and loses, and a trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.max_lag, self.batch, self.size = 1, 6, 4
        self.book = ledger(self.max_lag, self.batch)
        self.now = 0
        self.count = 0
        self.running: list[str] = []
        self.unresolved: list[tuple[str, int]] = []
        self.logs: list[list[str | None]] = [[], []]
        """Per partition: the admitted rollout at each offset; None where it was dropped, a repeat, or is consumed."""
        self.told: list[tuple[int, int, str, bool]] = []
        self.position = [0, 0]

    def waiting(self) -> int:
        return sum(r is not None for log in self.logs for r in log)

    def under_way(self) -> int:
        return self.waiting() + len(self.running) + len(self.unresolved)

    @precondition(lambda self: self.book.may_start(self.size))
    @rule()
    def start(self) -> None:
        ids = [f"r{self.count + i}" for i in range(self.size)]
        self.count += self.size
        self.running += ids
        self.book.start(ids)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def produce(self, data: st.DataObject) -> None:
        rollout = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.unresolved.append((rollout, self.now))
        self.book.produced(rollout, self.now)

    @precondition(lambda self: self.unresolved)
    @rule(data=st.data(), partition=st.integers(0, 1), admitted=st.booleans())
    def fate(self, data: st.DataObject, partition: int, admitted: bool) -> None:
        rollout, _ = self.unresolved.pop(data.draw(st.integers(0, len(self.unresolved) - 1)))
        self.logs[partition].append(rollout if admitted else None)
        self.tell(partition, rollout, admitted)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        partition, _, rollout, admitted = data.draw(st.sampled_from(self.told))
        self.logs[partition].append(None)
        self.tell(partition, rollout, admitted)

    def tell(self, partition: int, rollout: str, admitted: bool) -> None:
        offset = len(self.logs[partition]) - 1
        self.told.append((partition, offset, rollout, admitted))
        self.book.sample(partition, offset, rollout + "-0", rollout, admitted=admitted)

    @precondition(lambda self: self.waiting() >= self.batch)
    @rule()
    def train(self) -> None:
        taken = 0
        for partition, log in enumerate(self.logs):
            while taken < self.batch and self.position[partition] < len(log):
                taken += log[self.position[partition]] is not None
                log[self.position[partition]] = None
                self.position[partition] += 1
        self.book.trained(self.book.version + 1, list(enumerate(self.position)))

    @precondition(lambda self: self.unresolved)
    @rule()
    def lose_one_and_wait(self) -> None:
        self.now = self.unresolved[0][1] + 1001
        late = {r for r, at in self.unresolved if at + 1000 < self.now}
        assert set(self.book.forget(self.now)) == late
        self.unresolved = [(r, at) for r, at in self.unresolved if r not in late]

    @invariant()
    def the_ledger_knows_what_is_under_way(self) -> None:
        assert self.book.running == len(self.running)
        assert self.book.unresolved == len(self.unresolved)
        assert self.book.ahead == self.waiting()

    @invariant()
    def the_bound_holds(self) -> None:
        assert self.under_way() <= (self.max_lag + 1) * self.batch

    @invariant()
    def the_trainer_never_starves(self) -> None:
        assert self.under_way() >= self.batch or self.book.may_start(self.size)


Pipeline.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_any_history_keeps_the_bound_and_the_trainer_fed = Pipeline.TestCase


@given(max_lag=st.integers(0, 3), batch=st.integers(1, 40), size=st.integers(1, 40), other=st.integers(0, 60))
def test_starting_all_that_may_start_ends_within_the_bound(
    max_lag: int, batch: int, size: int, other: int
) -> None:
    book = ledger(max_lag, batch)
    for i in range(other):
        book.sample(0, i, f"o{i}-0", f"o{i}", admitted=True)
    started = 0
    while book.may_start(size):
        book.start(f"r{started + i}" for i in range(size))
        started += size
    under_way = started + other
    assert under_way >= batch
    assert under_way <= max((max_lag + 1) * batch, batch - 1 + size, other)
