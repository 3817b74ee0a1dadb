"""Following the weights topic: what is loaded next, and that a bad update costs nothing but time."""

import threading

import numpy as np
import pytest
from weights_kit import Setup, Trainer

from headrace.producers.engines.scripted import ScriptedEngine
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import EngineError
from headrace.schemas.weights import BlobKind, WeightRecord


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

    def _write(self, update):
        super()._write(update)
        if self.lie:
            self._weights["a"].reshape(-1)[1] ^= 1


class Unseen(Lying):
    """Cannot show single weights: all of them are hashed in each pause."""

    verify = None


@pytest.mark.parametrize(("kind", "said"), [(Lying, "live_bits"), (Unseen, "live_hash")])
def test_weights_that_are_not_what_was_written_are_never_served(kind, said):
    trainer = Trainer()
    engine = kind()
    s = Setup(trainer, engine)
    s.see(trainer.records[0])
    engine.lie = True
    s.subscriber.see([trainer.step()])  # changes the elements 1 and 8
    assert s.subscriber.follow()
    assert s.last.state is EngineState.POISONED and said in s.last.reason
    with pytest.raises(EngineError):
        engine._refuse()
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

    def watching(blobs):
        assert s.engine._step.acquire(blocking=False)
        s.engine._step.release()
        held.set()
        return fetch(blobs)

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
