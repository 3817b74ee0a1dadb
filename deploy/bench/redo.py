"""Every version of the log made again from version 0's model: each weights hash must come out the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...consumers.trainer.refs import RefReader
from ...consumers.trainer.sample_list import samples_of
from ...schemas.config import Config
from ...schemas.errors import ConfigError
from ...schemas.sample import SAMPLE
from ...schemas.score import Ref
from ...schemas.topics import SAMPLES, TRAJECTORIES, Topics
from ...schemas.weight_hash import set_hash
from ...schemas.weights import WeightRecord
from ...streams.blobs import BlobStore
from ...streams.kafka import closing

TELL_SECONDS = 5.0
AHEAD = 32
"""Versions whose records are read together: one read takes about a second, however much it brings."""


@dataclass(frozen=True, slots=True)
class Redone:
    """What came of it."""

    versions: int
    """Checked, version 0 among them."""
    mismatches: int
    """Versions whose hash did not come out, or that could not be made again."""
    problem: str | None = None
    """About the first of them; the redo ends there, for every later version builds on it."""


def redo_all(config: Config, records: Sequence[WeightRecord], tell: Callable[[str], object]) -> Redone:
    """Redo `records`, the whole weights topic from version 0 on. Raises BrokerError, ConfigError."""
    from ...consumers.trainer.payloads import Payloads
    from ...consumers.trainer.resume import Redo, RedoError, config_hash
    from ...consumers.trainer.step import make_learner

    if config.policy.model is None:
        raise ConfigError("policy.model is not set: a redo starts from the model's directory")
    topics = Topics(config.run.namespace)
    learner = make_learner(config.policy.model, config.trainer)
    store = BlobStore(config.store_uri)
    settings, told, checked = config_hash(config.trainer), time.monotonic(), 0

    def reader(topic: str) -> _Ahead:
        return _Ahead(config.kafka, topic, client_id="headrace-redo")

    with (
        closing(reader(topics.name(SAMPLES, config.policy.id))) as samples,
        closing(reader(topics.name(TRAJECTORIES))) as trajectories,
    ):
        redo = Redo(samples, Payloads(trajectories, store), store)
        for number, record in enumerate(records):
            if number % AHEAD == 0:
                chunk = records[number : number + AHEAD]
                held = samples.hold(ref for r in chunk for ref in samples_of(r, store))
                trajectories.hold(SAMPLE.decode(raw.value, raw.headers).ref for raw in held.values())
            try:
                if record.version > 0:
                    redo.step(learner, record, settings)
                elif set_hash(learner.bits()) != record.weights_hash:
                    raise RedoError("version 0 is not the model's")
            except RedoError as e:
                return Redone(checked, 1, str(e))
            checked += 1
            if time.monotonic() - told > TELL_SECONDS:
                told = time.monotonic()
                tell(f"redone {checked} of {len(records)} versions")
    return Redone(checked, 0)


class _Ahead(RefReader):
    """Answers with what was read ahead."""

    _held: dict[Ref, Any]

    def hold(self, refs: Iterable[Ref]) -> dict[Ref, Any]:
        """Read these, and forget the ones before."""
        self._held = super().fetch(refs)
        return self._held

    def fetch(self, refs: Iterable[Ref], *, timeout_s: float = 60.0) -> dict[Ref, Any]:
        """Those of `refs` that are held."""
        return {ref: self._held[ref] for ref in refs if ref in self._held}
