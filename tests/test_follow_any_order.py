"""Whatever the order of records, whichever blobs fail and whenever the engine breaks off: no torn weights are served.

And in the end the engine stands at the newest version that the blobs which are left can lead to.
"""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_kit import Setup, Trainer

from headrace.producers.engines.pauses import Pauses
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.schemas.errors import BlobError, BlobNotFoundError, EngineError, WeightUpdateError
from headrace.schemas.weights import BlobKind
from headrace.streams.blobs import BlobStore

VERSIONS = 14
TRAINER = Trainer(anchor_every=4)
for _version in range(1, VERSIONS + 1):
    TRAINER.step(empty=_version % 5 == 3)
BLOBS = [(r.version, b.kind) for r in TRAINER.records for b in r.blobs]


class Store:
    """The trainer's blobs, some of which fail so many times, or for ever in one of three ways."""

    def __init__(self, store: BlobStore, passing: dict, lost: dict) -> None:
        self._store, self._passing, self._lost = store, dict(passing), lost

    def get(self, ref):
        version, kind = ref.name.removeprefix("weights/").split("-")
        blob = (int(version), BlobKind(kind))
        if self._passing.get(blob, 0) > 0:
            self._passing[blob] -= 1
            raise BlobError(f"{ref.name}: 503")
        how = self._lost.get(blob)
        if how == "gone":
            raise BlobNotFoundError(f"{ref.name} does not exist")
        data = self._store.get(ref)
        return data[: len(data) // 2] if how == "cut" else b"rubbish" if how == "rubbish" else data


class Breaking(ScriptedEngine):
    """Its next applies each go well, are refused, break off before the first write, or in the middle of it."""

    def __init__(self, outcomes: list[str]) -> None:
        super().__init__()
        self._outcomes = list(outcomes)

    def apply(self, update):
        outcome = self._outcomes.pop(0) if self._outcomes else "well"
        if outcome == "refuse":
            raise WeightUpdateError("base_version", "somebody else moved it")
        if outcome == "early":
            raise RuntimeError("the device is gone")
        super().apply(update)
        if outcome == "torn":
            self._weights["a"].reshape(-1)[7] ^= 0x55
            raise RuntimeError("the device went away")
        if outcome == "wrong":
            for patch in update.patches[:1]:
                self._weights[patch.name].reshape(-1)[0 if patch.indices is None else patch.indices[0]] ^= 1

    @property
    def serves(self) -> bool:
        try:
            self._refuse()
        except EngineError:
            return False
        return True


def check(engine: Breaking) -> None:
    """What is served is, bit for bit, a version that was published, and the one that it says."""
    if engine.serves:
        published = TRAINER.weights[engine.version]
        assert all(np.array_equal(engine._weights[name], bits) for name, bits in published.items())


def reachable(version: int, lost: dict) -> int:
    """By anchors that are left, or from the live `version` on (-1: none), over deltas that are left."""
    best = -1
    for start in range(VERSIONS + 1):
        has_anchor = (start, BlobKind.ANCHOR) in BLOBS and (start, BlobKind.ANCHOR) not in lost
        if has_anchor or start == version:
            end = start
            while end < VERSIONS and passable(end + 1, lost):
                end += 1
            best = max(best, end)
    return best


def passable(version: int, lost: dict) -> bool:
    unchanged = TRAINER.hash(version) == TRAINER.hash(version - 1)  # then its blob is not even fetched
    return unchanged or (version, BlobKind.DELTA) not in lost


EVENTS = st.one_of(
    st.integers(0, VERSIONS),
    st.sampled_from(["follow", "follow", "wait", "minute", "hold", "release"]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(EVENTS, max_size=40),
    passing=st.dictionaries(st.sampled_from(BLOBS), st.integers(1, 7), max_size=6),
    lost=st.dictionaries(st.sampled_from(BLOBS), st.sampled_from(["gone", "cut", "rubbish"]), max_size=8),
    outcomes=st.lists(st.sampled_from(["well", "refuse", "early", "torn", "wrong"]), max_size=8),
    max_chain=st.integers(1, 6),
)
def test_torn_weights_are_never_served_and_the_newest_reachable_version_is_reached(
    events, passing, lost, outcomes, max_chain
):
    engine = Breaking(outcomes)
    pauses = Pauses(engine)
    s = Setup(TRAINER, engine, pauses, max_chain=max_chain)
    s.subscriber._store = Store(TRAINER.store, passing, lost)
    try:
        for event in events:
            if isinstance(event, int):
                s.subscriber.see([TRAINER.records[event]])
            elif event == "follow":
                s.subscriber.follow()
                check(engine)
            elif event in ("hold", "release"):
                getattr(pauses, event)()
            else:
                s.clock.now += 60.0 if event == "minute" else 0.3
        pauses.release()
        for _ in range(40):
            if s.subscriber.look_back() or s.subscriber.version < 0:
                s.subscriber.see(TRAINER.records)
            s.subscriber.see(TRAINER.records[-5:])
            for _ in range(100):
                if not s.subscriber.follow():
                    break
                check(engine)
            s.clock.now += 61.0
        live = s.subscriber.version if engine.serves else -1
        best = reachable(live, lost)
        assert live == best, (s.last, best)
        assert best < 0 or s.last.weights_hash == TRAINER.hash(best)
        assert s.last.behind == VERSIONS - best or best < 0
    finally:
        pauses.release()
