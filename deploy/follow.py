"""Reads a run's log into its History: weights, engines and samples record by record, the others by their ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kafka.errors import KafkaError

from ..schemas.config import Config
from ..schemas.deadletter import OpenLetters
from ..schemas.engine import ENGINE
from ..schemas.errors import InvalidMessageError
from ..schemas.sample import FATE_HEADER, SAMPLE, Fate
from ..schemas.topics import DEADLETTERS, ENGINES, SAMPLES, TRAJECTORIES, Topics
from ..schemas.topics import WEIGHTS as WEIGHTS_TOPIC
from ..schemas.weights import WEIGHTS
from ..streams.kafka import make_consumer, partitions_of, poll_records
from .history import History

logger = logging.getLogger(__name__)

COUNT_SECONDS = 1.0
"""Between two looks at the ends of topics."""
CATCH_UP_SECONDS = 10.0


class Follower:
    """A plain consumer that belongs to no group."""

    def __init__(self, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.history = History()
        self._clock = clock
        topics, policy = Topics(config.run.namespace), config.policy.id
        self._policy = policy
        self._consumer = make_consumer(config.kafka, client_id="headrace-follower")
        self._weights = partitions_of(self._consumer, topics.name(WEIGHTS_TOPIC, policy))
        engines = partitions_of(self._consumer, topics.name(ENGINES))
        samples = partitions_of(self._consumer, topics.name(SAMPLES, policy))
        self._trajectories = partitions_of(self._consumer, topics.name(TRAJECTORIES))
        self._letters = partitions_of(self._consumer, topics.name(DEADLETTERS))
        self._followed = [*self._weights, *engines, *samples, *self._letters]
        self._samples = samples[0].topic
        self._consumer.assign(self._followed)
        # A run that goes on after a restart keeps its curve; its earlier engines and fates are of no interest.
        self._consumer.seek_to_beginning(*self._weights, *self._letters)
        self._consumer.seek_to_end(*engines, *samples)
        self._counted = 0.0
        self._open_letters = OpenLetters()

    def poll(self, timeout_s: float) -> bool:
        """Take in what there is, sleeping `timeout_s` where that is nothing; True if the learning curve grew."""
        before = len(self.history.steps)
        for record in poll_records(self._consumer, idle_seconds=timeout_s):
            self._take(record)
        if self._clock() - self._counted > COUNT_SECONDS:
            self._count()
        return len(self.history.steps) > before

    def catch_up(self) -> None:
        """Read everything that is on the log at this moment."""
        deadline = self._clock() + CATCH_UP_SECONDS
        try:
            ends = self._consumer.end_offsets(self._followed, timeout_ms=int(CATCH_UP_SECONDS * 1000))
        except KafkaError as e:
            logger.warning("the end of the log cannot be read, figures may be missing: %s", e)
            return
        while any(self._consumer.position(p) < ends[p] for p in ends) and self._clock() < deadline:
            self.poll(0.02)
        self._count()

    def close(self) -> None:
        """Leave."""
        self._consumer.close()

    def _take(self, record: object) -> None:
        value, headers = record.value, record.headers  # type: ignore[attr-defined]
        if record.topic == self._letters[0].topic:  # type: ignore[attr-defined]
            self._open_letters.take(record.offset, headers)  # type: ignore[attr-defined]
            self.history.dead_letters = len(self._open_letters)
            return
        if value is None:
            return
        try:
            if record.topic == self._weights[0].topic:  # type: ignore[attr-defined]
                self.history.add_weights(WEIGHTS.decode(value, headers))
            elif record.topic == self._samples:  # type: ignore[attr-defined]
                # Most are admitted, and their header says so.
                admitted = dict(headers).get(FATE_HEADER) == Fate.ADMITTED.value.encode()
                self.history.add_fate(None if admitted else SAMPLE.decode(value, headers).reason)
            else:
                status = ENGINE.decode(value, headers)
                if status.policy_id == self._policy:
                    self.history.add_engine(status)
        except InvalidMessageError as e:
            logger.warning("a record cannot be shown: %s", e)

    def _count(self) -> None:
        self._counted = self._clock()
        try:
            ends = self._consumer.end_offsets(self._trajectories, timeout_ms=int(COUNT_SECONDS * 1000))
        except KafkaError as e:  # a broker that is away is being started again: whoever polls must not wait
            logger.warning("the broker does not answer: %s", e)
            return
        self.history.trajectories = sum(ends[p] for p in self._trajectories)
