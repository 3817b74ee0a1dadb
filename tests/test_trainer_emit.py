"""Each rank stores its own part of a version; joined they are the whole, bit for bit, however it was cut."""

from __future__ import annotations

import logging
import tracemalloc
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_ranks import on_threads

from headrace.consumers.trainer.bits import rounded_rows
from headrace.consumers.trainer.emit import Emitter
from headrace.consumers.trainer.history import History, load_bits
from headrace.consumers.trainer.shards import Span, cut, part
from headrace.consumers.trainer.team import Alone
from headrace.schemas.errors import BlobError, TeamError
from headrace.schemas.weight_hash import set_hash
from headrace.schemas.weights import WEIGHTS, BlobKind, WeightRecord
from headrace.streams.blobs import BlobRef, BlobStore, memory_store

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (17, 8),
    "layers.0.experts": (5, 3, 4),
    "layers.0.norm": (2,),
    "layers.0.one": (1, 6),
    "empty": (0, 4),
}
"""Uneven over 2 and 3 ranks, fewer rows than ranks, and none at all."""


@dataclass
class Held:
    """One rank's rows of a float32 master."""

    whole: dict[str, np.ndarray]
    team: Any = field(default_factory=Alone)

    @property
    def spans(self) -> Mapping[str, Span]:
        return cut({n: w.shape for n, w in self.whole.items()}, self.team.rank, self.team.size)

    def values(self, name: str) -> np.ndarray:
        return part(self.whole[name], self.spans[name])


def master(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.normal(0, 0.02, shape).astype(np.float32) for n, shape in SHAPES.items()}


def step(whole: dict[str, np.ndarray], seed: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: w + rng.normal(0, scale, w.shape).astype(np.float32) for n, w in whole.items()}


def bits_of(whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: rounded_rows(Held(whole), name) for name in whole}


def run(size: int, masters: list[dict[str, np.ndarray]], store: BlobStore) -> list[WeightRecord]:
    """The records that `size` ranks make of consecutive masters, which must be the same on every rank."""

    def act(team: Any) -> list[WeightRecord]:
        emitter = Emitter(store, "policy", anchor_every=3, team=team)
        records = []
        for whole in masters:
            records.append(silent(emitter, whole, team))
            settle(emitter, team)
        return records

    first, *others = on_threads(size, act)
    for records in others:
        assert [plain(r) for r in records] == [plain(r) for r in first]
    return [WEIGHTS.decode(WEIGHTS.encode(r), []) for r in first]


def silent(emitter: Emitter, whole: dict[str, np.ndarray], team: Any, **how: Any) -> WeightRecord:
    """Rank 0 tells, the others hear: here all know already."""
    hear(team)
    return emitter.encode(Held(whole, team), **how)


def settle(emitter: Emitter, team: Any) -> None:
    hear(team)
    emitter.settle()


def hear(team: Any) -> None:
    if team.rank:
        team.broadcast(b"")


def plain(record: WeightRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in WeightRecord.__slots__ if name != "created_ms"}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_cut_gives_the_same_bits_and_the_same_hashes(size: int) -> None:
    masters = [master(0)]
    for seed, scale in enumerate((1e-5, 1e-1, 0.0, 1e-6), start=1):
        masters.append(step(masters[-1], seed, scale))
    store = memory_store()
    history = History(run(size, masters, store))
    for version, whole in enumerate(masters):
        record = history.get(version)
        assert record is not None
        expected = bits_of(whole)
        assert record.weights_hash == set_hash(expected)
        assert len(record.blobs_of(BlobKind.DELTA)) == (0 if version == 0 else size)
        assert len(record.blobs_of(BlobKind.ANCHOR)) == (size if version % 3 == 0 else 0)
        if version:
            before = bits_of(masters[version - 1])
            assert record.base_hash == set_hash(before)
            assert record.changed_elements == sum(int((before[n] != b).sum()) for n, b in expected.items())
        found = load_bits(history.chain(version), store, SHAPES)
        assert set(found) == set(expected)
        for name, bits in expected.items():
            assert np.array_equal(found[name], bits), name


def test_one_cut_goes_on_where_another_stood() -> None:
    """A trainer that comes back with another number of ranks: its deltas go on top of the log's version."""
    first, second = master(0), step(master(0), 1, 1e-4)
    store = memory_store()
    records = run(2, [first], store)

    def act(team: Any) -> WeightRecord:
        emitter = Emitter(store, "policy", anchor_every=3, team=team)
        hear(team)
        emitter.stand_at(0, Held(first, team))
        return silent(emitter, second, team)

    records.append(on_threads(3, act)[0])
    found = load_bits(History(records).chain(1), store, SHAPES)
    assert all(np.array_equal(found[name], bits) for name, bits in bits_of(second).items())


def test_an_update_without_a_change_is_a_small_valid_record() -> None:
    store = memory_store()
    records = run(2, [master(0), master(0)], store)
    assert records[1].changed_elements == 0 and records[1].weights_hash == records[0].weights_hash
    assert all(0 < b.size < 4000 for b in records[1].blobs)
    assert set_hash(load_bits(History(records).chain(1), store, SHAPES)) == records[1].weights_hash


class Broken(BlobStore):
    """A store in memory that fails while it is told to."""

    failing = False

    def put_file(self, stem: str, source: Path) -> BlobRef:
        if self.failing:
            raise BlobError("no room")
        return super().put_file(stem, source)


def test_a_part_that_cannot_be_stored_makes_no_record_on_any_rank(caplog: pytest.LogCaptureFixture) -> None:
    first, second = master(0), step(master(0), 1, 1e-4)
    shared = f"memory://{uuid.uuid4().hex}"
    slept: list[float] = []

    def act(team: Any) -> Any:
        store = Broken(shared)
        emitter = Emitter(store, "policy", anchor_every=9, team=team, sleep=slept.append)
        silent(emitter, first, team)
        settle(emitter, team)
        stood = emitter.weights_hash
        store.failing = team.rank == 1
        try:
            silent(emitter, second, team)
            failed: Exception | None = None
        except (BlobError, TeamError) as e:
            failed = e
        assert emitter.weights_hash == stood
        store.failing = False
        return failed, silent(emitter, second, team)

    with caplog.at_level(logging.WARNING):
        results = on_threads(3, act)
    assert [type(failed) for failed, _ in results] == [TeamError, BlobError, TeamError]
    assert str(results[0][0]) == "rank 1 failed: no room"
    assert slept == [0.1, 0.5, 2.0, 5.0]
    # What was stored of the attempt is harmless: the next one makes the same blobs, and the record names them.
    again = results[0][1]
    assert {b.uri for b in again.blobs} < set(BlobStore(shared).names("weights/policy"))
    assert len(BlobStore(shared).names("weights/policy")) == 3 + 3
    assert again.version == 1 and again.weights_hash == set_hash(bits_of(second))


def test_what_does_not_get_into_the_log_leaves_the_base_as_it_was() -> None:
    store = memory_store()
    emitter = Emitter(store, "policy", anchor_every=9)
    records = []
    for whole in (master(0), step(master(0), 1, 1e-4)):
        records.append(emitter.encode(Held(whole)))
        emitter.settle()
    lost = emitter.encode(Held(step(master(0), 2, 1e-3)))
    taken = emitter.encode(Held(step(master(0), 3, 1e-3)))
    assert lost.version == taken.version == 2 and lost.base_hash == taken.base_hash == records[1].weights_hash
    found = load_bits(History([*records, taken]).chain(2), store, SHAPES)
    assert set_hash(found) == taken.weights_hash == set_hash(bits_of(step(master(0), 3, 1e-3)))


def test_changes_below_the_rounding_are_not_sent_and_nothing_drifts() -> None:
    rng = np.random.default_rng(0)
    whole = {"w": rng.normal(0, 0.02, (40, 25)).astype(np.float32)}
    store = memory_store()
    emitter = Emitter(store, "policy", anchor_every=10_000)
    records = [emitter.encode(Held(whole))]
    emitter.settle()
    sent = 0
    for _ in range(1000):
        before = rounded_rows(Held(whole), "w")
        whole["w"] += rng.normal(0, 1e-6, whole["w"].shape).astype(np.float32)
        records.append(emitter.encode(Held(whole)))
        emitter.settle()
        differing = int((before != rounded_rows(Held(whole), "w")).sum())
        assert records[-1].changed_elements == differing
        sent += differing
    assert 0 < sent < whole["w"].size * 1000 // 20
    found = load_bits(History(records).chain(1000), store, {"w": (40, 25)})
    assert np.array_equal(found["w"], rounded_rows(Held(whole), "w"))
    assert set_hash(found) == emitter.weights_hash == records[-1].weights_hash


def test_encoding_needs_no_second_copy_of_the_model(tmp_path: Path) -> None:
    """A delta and an anchor beside it, of a model of 32 MB: what they need does not grow with it."""
    rng = np.random.default_rng(0)
    one = rng.normal(0, 0.02, (1024, 1024)).astype(np.float32)
    whole = {f"w{i}": one.copy() for i in range(16)}
    emitter = Emitter(BlobStore(str(tmp_path)), "policy", anchor_every=2)
    emitter.encode(Held(whole))
    emitter.settle()
    peaks = []
    for _ in range(2):
        change = rng.normal(0, 1e-6, one.shape).astype(np.float32)
        for w in whole.values():
            w += change
        tracemalloc.start()
        try:
            record = emitter.encode(Held(whole))
            emitter.settle()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert record.has_anchor and record.has_delta
    print(f"bytes at most, for a delta and for a delta with an anchor: {peaks}")
    assert max(peaks) < 20 << 20
