"""One delta in the place of many: who joins late takes it, and is no worse off where it is broken or gone."""

from __future__ import annotations

import pytest
from weights_kit import Setup, Trainer

from headrace.schemas.delta import encode_delta
from headrace.schemas.weights import BlobKind
from headrace.streams.blobs import BlobRef
from headrace.streams.compacts import compact_stem


def compacted(trainer: Trainer, first: int, last: int) -> BlobRef:
    made = encode_delta(trainer.weights[first], trainer.weights[last], base_version=first, version=last)
    records = {r.version: r for r in trainer.records}
    return trainer.store.put_content(compact_stem(records, first, last), made.blob)


class Counting(Setup):
    """A late joiner, and the names of the blobs that it fetched."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.fetched: list[str] = []
        get = trainer.store.get

        def counted(ref: BlobRef) -> bytes:
            self.fetched.append(ref.name)
            return get(ref)

        trainer.store.get = counted  # type: ignore[method-assign]

    def join(self) -> None:
        self.subscriber.see(self.trainer.records)
        self.subscriber.look_for_compacted()
        self.settle()


@pytest.fixture
def trainer() -> Trainer:
    made = Trainer(anchor_every=20)
    made.steps(37)
    return made


def test_a_late_joiner_fetches_an_anchor_and_one_delta(trainer: Trainer) -> None:
    ref = compacted(trainer, 20, 36)
    late = Counting(trainer)
    late.join()
    late.check_live(37)
    assert late.fetched == ["weights/20-anchor", ref.name, "weights/37-delta"]


def test_without_one_it_fetches_them_all(trainer: Trainer) -> None:
    late = Counting(trainer)
    late.join()
    late.check_live(37)
    assert len(late.fetched) == 18


@pytest.mark.parametrize("fault", ["broken", "other", "deleted"])
def test_one_that_cannot_be_used_is_gone_around(trainer: Trainer, fault: str) -> None:
    ref = compacted(trainer, 20, 37)
    late = Counting(trainer)
    late.subscriber.see(trainer.records)
    late.subscriber.look_for_compacted()
    if fault == "broken":
        trainer.store.put(ref.name, b"x" * ref.size)
    elif fault == "deleted":
        trainer.store.delete(ref.name)
    else:
        trainer.store.delete(ref.name)
        stem = compact_stem({r.version: r for r in trainer.records}, 20, 37)
        wrong = encode_delta(trainer.weights[20], trainer.weights[30], base_version=20, version=37)
        trainer.store.put_content(stem, wrong.blob)
        late.subscriber.look_for_compacted()
    late.settle()
    late.check_live(37)
    assert "weights/37-delta" in late.fetched


def test_one_of_versions_that_the_log_does_not_have_is_left_alone(trainer: Trainer) -> None:
    records = {r.version: r for r in trainer.records}
    trainer.store.put_content(compact_stem(records, 90, 99), b"later than all")
    late = Counting(trainer)
    late.join()
    late.check_live(37)
    assert not any("v000090" in name for name in late.fetched)


def test_deltas_that_were_collected_are_made_good_by_a_compacted_one(trainer: Trainer) -> None:
    compacted(trainer, 20, 30)
    for version in range(21, 31):
        trainer.store.delete(trainer.records[version].blobs_of(BlobKind.DELTA)[0].uri)
    late = Counting(trainer)
    late.join()
    late.check_live(37)
