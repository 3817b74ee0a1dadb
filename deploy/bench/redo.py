"""Every version of the log made again from version 0's model: each weights hash must come out the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...schemas.config import Config
from ...schemas.errors import ConfigError
from ...schemas.topics import SAMPLES, TRAJECTORIES, Topics
from ...schemas.weight_hash import set_hash
from ...schemas.weights import WeightRecord
from ...streams.blobs import BlobStore
from ...streams.kafka import closing

TELL_SECONDS = 5.0


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
    from ...consumers.trainer.refs import RefReader
    from ...consumers.trainer.resume import Redo, RedoError, config_hash
    from ...consumers.trainer.step import make_learner

    if config.policy.model is None:
        raise ConfigError("policy.model is not set: a redo starts from the model's directory")
    topics = Topics(config.run.namespace)
    learner = make_learner(config.policy.model, config.trainer)
    settings, told, checked = config_hash(config.trainer), time.monotonic(), 0

    def reader(topic: str) -> RefReader:
        return RefReader(config.kafka, topic, client_id="headrace-redo")

    with (
        closing(reader(topics.name(SAMPLES, config.policy.id))) as samples,
        closing(reader(topics.name(TRAJECTORIES))) as trajectories,
    ):
        redo = Redo(samples, Payloads(trajectories, BlobStore(config.store_uri)))
        for record in records:
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
