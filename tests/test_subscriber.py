"""Following the weights topic: what is loaded next, and that a bad update costs nothing but time."""

import threading

import numpy as np
import pytest

from headrace.producers.engines.follower import Follower, FollowRule
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.producers.engines.subscriber import WeightSubscriber
from headrace.schemas.delta import encode_anchor, encode_delta
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import EngineError
from headrace.schemas.weight_hash import set_hash
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord
from headrace.streams.blobs import memory_store


class Trainer:
    """Makes weight records and blobs as a trainer does; an anchor every `anchor_every` versions."""

    def __init__(self, anchor_every: int = 1000) -> None:
        self.store = memory_store()
        self.anchor_every = anchor_every
        self.weights = [{"a": np.arange(60, dtype=np.uint16).reshape(6, 10), "b": np.ones(5, np.uint16)}]
        self.records = [self._record(0, None, None)]

    def step(self, *, empty: bool = False) -> WeightRecord:
        base, version = self.weights[-1], len(self.weights)
        new = {name: bits.copy() for name, bits in base.items()}
        if not empty:
            new["a"].reshape(-1)[[version % 60, (version * 7 + 1) % 60]] += 5
        self.weights.append(new)
        self.records.append(self._record(version, base, new))
        return self.records[-1]

    def steps(self, n: int) -> list[WeightRecord]:
        return [self.step() for _ in range(n)]

    def hash(self, version: int) -> int:
        return set_hash(self.weights[version])

    def overwrite(self, record: WeightRecord, kind: BlobKind, data: bytes) -> None:
        """The blob's bytes as they stand in the store; its record stays."""
        self.store.put(record.blobs_of(kind)[0].uri, data)

    def restore(self, version: int, kind: BlobKind) -> None:
        self._blob(version, kind, self._delta(version) if kind is BlobKind.DELTA else self._anchor(version))

    def _delta(self, version: int) -> bytes:
        base, new = self.weights[version - 1], self.weights[version]
        return encode_delta(base, new, base_version=version - 1, version=version).blob

    def _anchor(self, version: int) -> bytes:
        return encode_anchor(self.weights[version], version)

    def _blob(self, version: int, kind: BlobKind, data: bytes) -> WeightBlob:
        ref = self.store.put(f"weights/{version}-{kind}", data)
        return WeightBlob(kind=kind, uri=ref.name, size=ref.size, sha256=ref.sha256)

    def _record(self, version, base, new) -> WeightRecord:
        blobs = []
        if base is not None:
            blobs.append(self._blob(version, BlobKind.DELTA, self._delta(version)))
        if version % self.anchor_every == 0:
            blobs.append(self._blob(version, BlobKind.ANCHOR, self._anchor(version)))
        return WeightRecord(
            policy_id="p",
            version=version,
            base_version=None if base is None else version - 1,
            base_hash=None if base is None else set_hash(base),
            weights_hash=set_hash(self.weights[version]),
            blobs=tuple(blobs),
        )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """A subscriber on a scripted engine, and everything that it published."""

    def __init__(self, trainer: Trainer, engine: ScriptedEngine | None = None, **rule) -> None:
        self.trainer, self.clock = trainer, Clock()
        self.engine = engine if engine is not None else ScriptedEngine()
        self.statuses = []
        self.subscriber = WeightSubscriber(
            self.engine,
            trainer.store,
            engine_id="e",
            policy_id="p",
            publish=self.statuses.append,
            follower=Follower(FollowRule(**rule)),
            clock=self.clock,
        )

    def see(self, *records: WeightRecord) -> None:
        self.subscriber.see(records)
        self.settle()

    def settle(self) -> None:
        for _ in range(50):
            if not self.subscriber.follow():
                return
        raise AssertionError("it never comes to rest")

    @property
    def last(self):
        return self.statuses[-1]

    def check_live(self, version: int) -> None:
        assert self.engine.version == self.subscriber.version == version
        assert self.engine.weights_hash() == self.trainer.hash(version)
        assert self.last.weights_hash == self.trainer.hash(version)


def test_deltas_are_applied_in_order_and_the_live_hash_is_the_trainers_after_each():
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0])
    s.check_live(0)
    for record in trainer.steps(5):
        s.see(record)
        s.check_live(record.version)
    assert s.last.updates == 6 and s.last.state is EngineState.IDLE and s.last.reason is None
    assert s.last.pause_ms is not None and s.last.stage_ms is not None and s.last.apply_ms is not None


def test_the_states_of_one_update_are_published_in_order():
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0])
    assert [x.state for x in s.statuses] == [EngineState.STAGING, EngineState.PAUSING, EngineState.IDLE]
    assert [x.version for x in s.statuses] == [-1, -1, 0]


def test_several_waiting_deltas_take_one_pause():
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0])
    s.see(*trainer.steps(7))
    s.check_live(7)
    assert s.last.updates == 2


def test_a_late_joiner_loads_the_newest_anchor_and_the_chain_from_there():
    trainer = Trainer(anchor_every=5)
    trainer.steps(13)
    s = Setup(trainer)
    for early in range(10):
        trainer.store.delete(f"weights/{early}-delta")
    s.see(*trainer.records)
    s.check_live(13)
    assert s.last.updates == 1


def test_duplicates_change_nothing():
    trainer = Trainer()
    s = Setup(trainer)
    records = [trainer.records[0], *trainer.steps(3)]
    s.see(*records)
    before = len(s.statuses)
    s.see(*records, records[1])
    s.check_live(3)
    assert len(s.statuses) == before


def test_a_gap_waits_for_an_anchor_and_says_so():
    trainer = Trainer(anchor_every=4)
    s = Setup(trainer)
    s.see(trainer.records[0], trainer.step())
    missing, third = trainer.steps(2)
    s.see(third)
    s.check_live(1)
    assert "waiting for an anchor" in s.last.reason and s.last.latest_version == 3
    s.see(trainer.step())  # version 4 has one
    s.check_live(4)
    assert s.last.reason is None
    s.see(missing)  # too late to matter
    s.check_live(4)


def test_a_wrong_base_is_never_staged_and_an_anchor_cures_it():
    trainer = Trainer(anchor_every=3)
    s = Setup(trainer)
    s.see(trainer.records[0], *trainer.steps(1))
    other = Trainer()
    other.weights[0] = {name: bits + np.uint16(1) for name, bits in other.weights[0].items()}
    strange = [other.step(), other.step()][1]
    s.see(strange)  # version 2 on a base that is not what is live
    s.check_live(1)
    trainer.step()
    s.see(trainer.step())  # version 3 has an anchor
    s.check_live(3)


@pytest.mark.parametrize("kind", ["missing", "corrupt", "other_delta"])
def test_a_bad_delta_blob_leaves_the_engine_serving_what_it_has(kind):
    trainer = Trainer(anchor_every=4)
    s = Setup(trainer, attempts=2)
    s.see(trainer.records[0], trainer.step())
    bad = trainer.step()
    if kind == "missing":
        trainer.store.delete(bad.blobs[0].uri)
    elif kind == "corrupt":
        trainer.overwrite(bad, BlobKind.DELTA, b"x" * bad.blobs[0].size)
    else:  # bytes and digest agree, contents do not
        data = trainer._delta(1)
        blob = trainer._blob(2, BlobKind.DELTA, data)
        bad = WeightRecord(**{f: getattr(bad, f) for f in bad.__slots__} | {"blobs": (blob,)})
    s.see(bad)
    for _ in range(5):
        s.clock.now += 10
        s.settle()
    s.check_live(1)
    assert s.last.state is EngineState.IDLE
    s.see(*trainer.steps(2))  # version 4 has an anchor
    s.check_live(4)
    assert s.last.reason is None


def test_a_blob_that_comes_late_is_fetched_again_after_a_while():
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0])
    late = trainer.step()
    trainer.store.delete(late.blobs[0].uri)
    s.see(late)
    s.check_live(0)
    assert "refused" in s.last.reason
    trainer.restore(1, BlobKind.DELTA)
    s.settle()
    s.check_live(0)  # not at once
    s.clock.now += 1
    s.settle()
    s.check_live(1)


def test_the_good_part_of_a_chain_is_applied():
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0])
    records = trainer.steps(4)
    trainer.overwrite(records[2], BlobKind.DELTA, b"broken")
    s.see(*records)
    s.check_live(2)


def test_a_broken_newest_anchor_falls_back_to_the_one_before():
    trainer = Trainer(anchor_every=3)
    trainer.steps(7)
    trainer.overwrite(trainer.records[6], BlobKind.ANCHOR, b"broken")
    s = Setup(trainer)
    s.see(*trainer.records)
    s.check_live(7)
    assert s.engine.weights_hash() == trainer.hash(7)


def test_an_empty_delta_advances_the_version_without_a_pause():
    trainer = Trainer()

    class NeverPaused(ScriptedEngine):
        pauses = 0

        def paused(self):
            NeverPaused.pauses += 1
            return super().paused()

    s = Setup(trainer, NeverPaused())
    s.see(trainer.records[0])
    pauses = NeverPaused.pauses
    s.see(trainer.step(empty=True))
    s.check_live(1)
    assert NeverPaused.pauses == pauses
    s.see(trainer.step())
    s.check_live(2)


class Tearing(ScriptedEngine):
    """Breaks off in the middle of a write when told to."""

    tear = False

    def _write(self, update):
        if self.tear and update.base_version is not None:
            self._weights["a"].reshape(-1)[0] ^= 1
            raise RuntimeError("the device is gone")
        super()._write(update)


def test_a_failure_after_the_first_write_poisons_and_an_anchor_heals():
    trainer = Trainer(anchor_every=3)
    engine = Tearing()
    s = Setup(trainer, engine)
    s.see(trainer.records[0], trainer.step())
    engine.tear = True
    s.subscriber.see([trainer.step()])
    assert s.subscriber.follow()
    assert s.last.state is EngineState.POISONED and "device is gone" in s.last.reason
    assert s.last.weights_hash is None
    with pytest.raises(EngineError):
        engine._refuse()
    engine.tear = False
    s.settle()  # the anchor of version 0 and the chain from there; version 2 has to wait a moment
    assert s.last.state is EngineState.IDLE
    s.check_live(1)
    s.clock.now += 60
    s.settle()
    s.check_live(2)
    engine._refuse()


def test_a_poisoned_engine_shows_it_until_it_is_healed():
    trainer = Trainer()
    engine = Tearing()
    s = Setup(trainer, engine, attempts=2)
    s.see(trainer.records[0])
    engine.tear = True
    trainer.store.delete("weights/0-anchor")
    seen = len(s.statuses)
    s.see(trainer.step())
    for _ in range(5):
        s.clock.now += 60
        s.settle()
    torn_at = next(i for i, x in enumerate(s.statuses) if x.state is EngineState.POISONED)
    assert torn_at > seen
    assert all(x.state is EngineState.POISONED for x in s.statuses[torn_at:])
    s.subscriber.stop()
    assert s.last.state is EngineState.STOPPED


class Lying(ScriptedEngine):
    """Its weights are not what was written."""

    lie = False

    def weights_hash(self):
        return super().weights_hash() ^ int(self.lie)


def test_weights_that_are_not_what_was_written_are_never_served():
    trainer = Trainer()
    engine = Lying()
    s = Setup(trainer, engine)
    s.see(trainer.records[0])
    engine.lie = True
    s.subscriber.see([trainer.step()])
    assert s.subscriber.follow()
    assert s.last.state is EngineState.POISONED and "live_hash" in s.last.reason
    engine.lie = False
    s.clock.now += 60
    s.settle()
    s.check_live(1)


def test_an_engine_that_refuses_before_writing_goes_on_serving():
    trainer = Trainer(anchor_every=2)
    s = Setup(trainer)
    s.see(trainer.records[0])
    s.engine._version = 5  # somebody else moved it
    s.subscriber.see([trainer.step()])
    assert s.subscriber.follow()
    assert s.last.state is EngineState.IDLE and "base_version" in s.last.reason
    s.engine._refuse()
    s.clock.now += 60
    s.settle()
    s.check_live(1)


def test_staging_happens_while_tokens_flow():
    """The engine is not paused while blobs are fetched and decoded."""
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0])
    held = threading.Event()
    fetch = s.subscriber._fetch

    def watching(record, kind):
        assert s.engine._step.acquire(blocking=False)
        s.engine._step.release()
        held.set()
        return fetch(record, kind)

    s.subscriber._fetch = watching
    s.see(trainer.step())
    assert held.is_set()
    s.check_live(1)


def test_only_what_may_be_needed_again_is_remembered():
    trainer = Trainer(anchor_every=5)
    s = Setup(trainer)
    s.see(trainer.records[0])
    for record in trainer.steps(40):
        s.see(record)
    assert len(s.subscriber._follower._records) <= 11
    assert all(not r.samples for r in s.subscriber._follower._records.values())
