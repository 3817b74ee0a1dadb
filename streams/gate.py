"""The staleness gate before `samples`, and the follower that tells it how far each policy is.

`VersionBook` is what is known; `VersionFollower` keeps it up to date from the weights topics with a plain
consumer in a thread (these topics are written by transactions, so Faust must not read them).
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from ..schemas.config import KafkaConfig
from ..schemas.errors import InvalidMessageError
from ..schemas.score import Score
from ..schemas.topics import WEIGHTS, Topics
from ..schemas.weights import WEIGHTS as WEIGHTS_RECORD
from . import metrics
from .kafka import make_consumer, partitions_of
from .staleness import is_stale, lag_of

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
"""Between polls: the embedded broker answers an empty fetch at once, and a waiting poll would ask it all the time."""
TAIL = 64
"""Records before the end where the newest version is looked for: versions come in order."""


def is_too_stale(score: Score, current_version: int | None, max_lag: int) -> bool:
    """True when the score's trajectory must not be trained on top of `current_version`.

    Before any version is known, only the part of the lag that arose while sampling counts.
    """
    current = score.version_max if current_version is None else current_version
    lag = lag_of(current_version=current, version_min=score.version_min, version_max=score.version_max)
    return is_stale(lag, max_lag)


def observe_lag(score: Score, current_version: int | None) -> None:
    """Put the lag of a score at the gate into the histograms."""
    current = score.version_max if current_version is None else current_version
    lag = lag_of(current_version=current, version_min=score.version_min, version_max=score.version_max)
    metrics.gate_in_flight.observe(lag.in_flight)
    metrics.gate_in_queue.observe(lag.in_queue)


class VersionBook:
    """The newest version published per policy. Thread-safe."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()

    def observe(self, policy_id: str, version: int) -> None:
        """A version was published; older ones are ignored."""
        with self._lock:
            self._versions[policy_id] = max(version, self._versions.get(policy_id, version))

    def current(self, policy_id: str) -> int | None:
        """The newest version; None while none is known."""
        return self._versions.get(policy_id)


class VersionFollower:
    """Reads the weights topics of the policies that it was told of."""

    def __init__(self, config: KafkaConfig, topics: Topics, book: VersionBook) -> None:
        self._config, self._topics, self.book = config, topics, book
        self._wanted: set[str] = set()
        self._ready: dict[str, threading.Event] = {}
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="versions", daemon=True)
        self.failure: BaseException | None = None
        """What ended the thread, if it ended by itself."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)

    def follow(self, policy_id: str, *, timeout_s: float = 30.0) -> None:
        """Follow `policy_id` too; returns when what was published so far has been read (or after `timeout_s`)."""
        ready = self._ready.setdefault(policy_id, threading.Event())
        self._wanted.add(policy_id)
        self._changed.set()
        if not ready.wait(timeout_s):
            logger.warning("the versions of policy=%s are not known yet; the gate lets it pass", policy_id)

    def _run(self) -> None:
        try:
            consumer = make_consumer(self._config, client_id="headrace-versions")
            try:
                self._loop(consumer)
            finally:
                consumer.close()
        except BaseException as e:
            self.failure = e
            logger.exception("the version follower broke")

    def _loop(self, consumer: Any) -> None:
        followed: dict[str, str] = {}  # topic -> policy
        while not self._stop.is_set():
            if not self._wanted:
                self._changed.wait()
            for policy_id in self._wanted - set(followed.values()):
                followed[self._topics.name(WEIGHTS, policy_id)] = policy_id
                self._assign(consumer, followed)
            self._changed.clear()
            for records in consumer.poll(timeout_ms=0).values():
                for record in records:
                    self._read(followed[record.topic], record)
            for topic, policy_id in followed.items():
                ready = self._ready[policy_id]
                if not ready.is_set() and self._at_end(consumer, topic):
                    ready.set()
            self._changed.wait(POLL_SECONDS)

    def _assign(self, consumer: Any, followed: dict[str, str]) -> None:
        tps = [tp for topic in followed for tp in partitions_of(consumer, topic)]
        known = {tp: consumer.position(tp) for tp in consumer.assignment()}
        consumer.assign(tps)
        starts, ends = consumer.beginning_offsets(tps), consumer.end_offsets(tps)
        for tp in tps:
            consumer.seek(tp, known.get(tp, max(starts[tp], ends[tp] - TAIL)))

    def _at_end(self, consumer: Any, topic: str) -> bool:
        tps = partitions_of(consumer, topic)
        ends = consumer.end_offsets(tps)
        return all(consumer.position(tp) >= ends[tp] for tp in tps)

    def _read(self, policy_id: str, record: Any) -> None:
        try:
            weights = WEIGHTS_RECORD.decode(record.value, record.headers)
        except InvalidMessageError as e:
            logger.warning("offset=%d of %s is no weight record: %s", record.offset, record.topic, e)
            return
        self.book.observe(policy_id, weights.version)
