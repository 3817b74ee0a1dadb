"""The known answers of following: catching up, repeats, gaps, lost blobs, stores and operators that hold things up."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from weights_kit import Setup, Trainer

from headrace.producers.engines import audit, role
from headrace.producers.engines.pauses import Pauses
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import BlobError, EngineError, WeightUpdateError
from headrace.schemas.update import WeightUpdate
from headrace.schemas.weights import BlobKind


class Watched(ScriptedEngine):
    """Remembers its pauses and what was applied in them."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.pauses, self.applied = 0, []

    def paused(self):
        self.pauses += 1
        return super().paused()

    def apply(self, update: WeightUpdate):
        super().apply(update)
        self.applied.append(update)


def test_versions_3_to_7_are_one_update_of_one_pause():
    trainer = Trainer()
    s = Setup(trainer, Watched())
    s.see(trainer.records[0], *trainer.steps(3))
    pauses = s.engine.pauses
    s.see(*trainer.steps(4))
    s.check_live(7)
    assert s.engine.pauses == pauses + 1
    update = s.engine.applied[-1]
    assert (update.base_version, update.version) == (3, 7)
    positions = np.concatenate([p.indices for p in update.patches])
    assert len(positions) == len(set(positions.tolist())) <= 8


def test_an_engine_that_joins_at_37_takes_anchor_20_and_goes_on_past_anchor_40_by_deltas():
    trainer = Trainer(anchor_every=20)
    s = Setup(trainer, Watched())
    s.subscriber.see([trainer.records[0], *trainer.steps(37)])
    assert s.subscriber.status().behind == 38
    s.settle()
    s.check_live(37)
    assert s.engine.pauses == 1 and s.engine.applied[0].base_version is None
    for record in trainer.steps(5):
        s.see(record)
        s.check_live(record.version)
        assert s.last.behind == 0
    assert [u.base_version for u in s.engine.applied[1:]] == [37, 38, 39, 40, 41]


def test_an_engine_at_12_goes_to_anchor_20_where_the_deltas_up_to_there_are_gone():
    trainer = Trainer(anchor_every=20)
    s = Setup(trainer, Watched())
    s.see(trainer.records[0], *trainer.steps(12))
    rest = trainer.steps(10)
    for version in range(1, 20):
        trainer.store.delete(f"weights/{version}-delta")
    s.see(*rest)
    s.check_live(22)
    assert [(u.base_version, u.version) for u in s.engine.applied[-1:]] == [(None, 22)]


def test_one_delta_delivered_twice_is_recognised_by_version_and_hash():
    trainer = Trainer()
    s = Setup(trainer, Watched())
    s.see(trainer.records[0], *trainer.steps(5))
    sixth = trainer.step()
    s.see(sixth)
    applied, told = len(s.engine.applied), len(s.statuses)
    s.see(sixth, replace(sixth, created_ms=5))
    s.check_live(6)
    assert len(s.engine.applied) == applied and len(s.statuses) == told


def test_a_version_ahead_waits_for_the_one_between_and_both_take_one_pause():
    trainer = Trainer()
    s = Setup(trainer, Watched())
    s.see(trainer.records[0], *trainer.steps(5))
    sixth, seventh = trainer.steps(2)
    s.see(seventh)
    s.check_live(5)
    assert s.subscriber.look_back() == "version 6 is missing"
    assert s.last.behind == 2 and "version 6" in s.last.reason
    pauses = s.engine.pauses
    s.see(sixth)
    s.check_live(7)
    assert s.engine.pauses == pauses + 1 and s.last.reason is None and s.last.behind == 0


def test_an_update_that_changes_no_bit_says_that_it_needed_no_pause():
    trainer = Trainer()
    s = Setup(trainer, Watched())
    s.see(trainer.records[0])
    assert s.last.paused is True and s.last.pause_ms is not None
    pauses = s.engine.pauses
    empty = trainer.step(empty=True)
    s.see(empty)
    s.check_live(1)
    assert s.last.paused is False and s.last.pause_ms is None and s.engine.pauses == pauses
    assert s.last.updates == 2 and s.last.behind == 0


class Away:
    """A store that answers 503 while it is told to."""

    def __init__(self, store):
        self._store, self.away, self.asked = store, False, 0

    def get(self, ref):
        self.asked += 1
        if self.away:
            raise BlobError(f"blob {ref.name} cannot be read: 503 Service Unavailable")
        return self._store.get(ref)


def test_a_store_that_is_away_for_a_minute_costs_a_minute_and_no_more():
    trainer = Trainer(anchor_every=20)
    s = Setup(trainer)
    s.see(trainer.records[0])
    store = s.subscriber._store = Away(trainer.store)
    store.away = True
    for second in range(60):
        s.see(*([trainer.step()] if second % 3 == 0 else []))
        s.check_live(0)
        s.clock.now += 1
    assert "503" in s.last.reason and s.last.behind == 20 and s.last.state is EngineState.IDLE
    assert store.asked < 60, "it is not asked in every loop"
    store.away = False
    s.clock.now += 5
    s.settle()
    s.check_live(20)
    assert s.last.reason is None and s.last.behind == 0


def test_an_operators_pause_is_updated_in_and_ended_by_the_operator_alone():
    trainer = Trainer()
    engine = Watched()
    pauses = Pauses(engine)
    s = Setup(trainer, engine, pauses=pauses)
    s.see(trainer.records[0])
    pauses.hold()
    pauses.hold()
    held_at = engine.pauses
    s.see(trainer.step())
    assert s.last.held is True
    s.see(*trainer.steps(2), trainer.step(empty=True))
    s.check_live(4)
    assert s.last.paused is False and s.last.pause_ms is None
    assert engine.pauses == held_at and not engine._step.acquire(blocking=False), "still paused"
    pauses.release()
    pauses.release()
    assert engine._step.acquire(blocking=False)
    engine._step.release()
    s.settle()
    assert s.last.held is False
    s.see(trainer.step())
    s.check_live(5)
    assert s.last.paused is True and engine.pauses == held_at + 1


def test_an_operators_pause_that_the_engine_refuses_is_none():
    class Refusing(ScriptedEngine):
        def paused(self):
            raise EngineError("the server does not answer")

    pauses = Pauses(Refusing())
    with pytest.raises(EngineError, match="does not answer"):
        pauses.hold()
    assert not pauses.held
    pauses.release()


def test_shards_are_followed_whatever_way_the_ranks_cut_them():
    trainer = Trainer(shards=3)
    s = Setup(trainer)
    s.see(trainer.records[0], *trainer.steps(2))
    s.check_live(2)
    assert len(trainer.records[2].blobs_of(BlobKind.DELTA)) == 3
    assert len(trainer.records[0].blobs_of(BlobKind.ANCHOR)) == 3
    bad = trainer.step()
    trainer.overwrite(bad, BlobKind.DELTA, b"x" * bad.blobs[0].size, shard=1)
    s.see(bad)
    s.check_live(2)
    assert "delta of version 3 refused" in s.last.reason


class Picky(ScriptedEngine):
    """Refuses what touches tensor `b`, before it writes anything."""

    def apply(self, update: WeightUpdate):
        if update.base_version is not None and any(p.name == "b" for p in update.patches):
            raise WeightUpdateError("unknown_tensor", "b")
        super().apply(update)


def test_what_the_engine_refuses_is_undone_and_the_good_versions_before_it_are_applied():
    trainer = Trainer()
    s = Setup(trainer, Picky())
    s.see(trainer.records[0], trainer.step())
    records = [*trainer.steps(2), trainer.step(also="b"), trainer.step()]
    s.see(*records)
    for _ in range(10):
        s.clock.now += 1
        s.settle()
    s.check_live(3)
    assert s.last.state is EngineState.IDLE and s.last.behind == 2
    assert "version 4 refused" in s.last.reason and "delta of version 4 cannot be used" in s.last.reason
    assert s.subscriber._replica.whole(3, 0).hashes == s.trainer.tensor_hashes(3)


def test_live_weights_that_change_by_themselves_are_noticed_and_reloaded():
    trainer = Trainer()
    s = Setup(trainer)
    s.see(trainer.records[0], trainer.step())
    s.engine._weights["a"][3, 3] ^= 1
    s.settle()
    assert s.last.state is EngineState.IDLE, "not looked at yet"
    s.clock.now += 301
    assert not s.subscriber.follow()
    assert s.last.state is EngineState.POISONED and "is live no longer" in s.last.reason
    with pytest.raises(EngineError):
        s.engine._refuse()
    s.settle()
    s.check_live(1)
    s.clock.now += 301
    s.settle()
    assert s.last.state is EngineState.IDLE


def test_an_audit_looks_at_every_tensor_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(audit, "AUDIT_BYTES", 100)
    seen = []

    class Seen(ScriptedEngine):
        def verify(self, update):
            if update.base_version == update.version:
                seen.append([p.name for p in update.patches])
            super().verify(update)

    trainer = Trainer()
    s = Setup(trainer, Seen())
    s.see(trainer.records[0], trainer.step())
    s.clock.now += 301
    for _ in range(5):
        assert not s.subscriber.follow()
    assert sorted(name for names in seen for name in names) == ["a", "b", "bulk"] and len(seen) == 2
    s.see(trainer.step())
    s.check_live(2)


def test_two_histories_on_one_topic_are_told_and_the_first_is_kept():
    trainer, other = Trainer(anchor_every=4), Trainer(anchor_every=4)
    other.store = trainer.store
    s = Setup(trainer)
    s.see(trainer.records[0], *trainer.steps(2))
    other.weights[0] = {name: bits + np.uint16(1) for name, bits in other.weights[0].items()}
    other.prefix = "weights/other"
    again = other._record(0, None, None)
    s.see(again, *other.steps(2))
    s.check_live(2)
    told = [x.reason for x in s.statuses if x.reason]
    assert "begins anew" in told[0] and "two records of version 1" in told[1]
    s.see(*trainer.steps(2))
    s.check_live(4)
    assert s.last.reason is None


class LeakyFeed:
    """A topic of which the first reading misses version 6."""

    def __init__(self, records):
        self._records, self._missed = records, 6
        self._at = 0
        self.rewound = threading.Event()

    def backlog(self):
        yield self.poll()

    def poll(self):
        new = [r for r in self._records[self._at :] if r.version != self._missed]
        self._at = len(self._records)
        threading.Event().wait(0.002)
        return new

    def rewind(self):
        self._at, self._missed = 0, None
        self.rewound.set()

    def close(self):
        pass


def test_the_topic_is_read_again_for_a_record_that_was_missed(monkeypatch):
    monkeypatch.setattr(role, "LOOK_BACK_SECONDS", (0.05, 1.0))
    trainer = Trainer()
    trainer.steps(7)
    s = Setup(trainer)
    feed = LeakyFeed(trainer.records)
    arrived = threading.Event()
    publish = s.subscriber._report._publish
    s.subscriber._report._publish = lambda x: (publish(x), arrived.set() if x.version == 7 else None)
    following = role.Following(s.subscriber, lambda: feed)
    following.start()
    assert feed.rewound.wait(20) and arrived.wait(20)
    following.stop()
    assert following.error is None
    assert s.last.state is EngineState.STOPPED
    s.check_live(7)
