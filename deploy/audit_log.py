"""Reads a run's topics for the audit: plain consumers that see committed transactions only, ids kept, no payloads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from ..consumers.trainer.sample_list import samples_of
from ..schemas.codec import POLICY_HEADER, header
from ..schemas.config import Config
from ..schemas.deadletter import SETTLES, read_dead_letter
from ..schemas.errors import BrokerError, InvalidMessageError
from ..schemas.sample import FATE_HEADER, SAMPLE, TRAJECTORY_HEADER, Fate
from ..schemas.score import SCORE
from ..schemas.topics import DEADLETTERS, SAMPLES, SCORES, TRAJECTORIES, WEIGHTS, Topics, TopicSpec
from ..schemas.trajectory import TRAJECTORY
from ..schemas.weights import WEIGHTS as WEIGHT_RECORD
from ..schemas.weights import WeightRecord
from ..streams.blobs import BlobStore
from ..streams.claims import check_out
from ..streams.kafka import closing, make_consumer, partitions_of, poll_records
from ..streams.status import STREAMS_GROUP, TRAINER_GROUP
from .audit import Audit, AuditResult

SILENT_SECONDS = 60.0
"""Without a record before the end of a topic: the broker is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLag:
    """Where one consumer group is in one topic."""

    group: str
    topic: str
    lag: int
    """Records between the committed offsets and the end."""
    partitions: Mapping[int, int]
    """Partition -> its lag, of those that have one."""


def run_audit(
    config: Config, *, ledger: Path | None = None, tell: Callable[[str], object] = lambda t: None
) -> AuditResult:
    """Read the whole log of `config`'s policy and do the books. Raises BrokerError."""
    with closing(make_consumer(config.kafka, client_id="headrace-audit", max_poll_records=5000)) as consumer:
        return _Books(config, consumer, tell).read(ledger)


def group_lags(config: Config) -> list[GroupLag]:
    """Of the processors and the trainer, per topic."""
    topics, policy = Topics(config.run.namespace), config.policy.id
    streams, trainer = topics.group(STREAMS_GROUP), topics.group(TRAINER_GROUP, policy)
    found = []
    for group, topic in (
        (streams, topics.name(TRAJECTORIES)),
        (streams, topics.name(SCORES)),
        (trainer, topics.name(SAMPLES, policy)),
    ):
        with closing(make_consumer(config.kafka, client_id="headrace-audit", group_id=group)) as consumer:
            tps = partitions_of(consumer, topic)
            ends, begins = consumer.end_offsets(tps), consumer.beginning_offsets(tps)
            lags = {tp.partition: ends[tp] - max(consumer.committed(tp) or 0, begins[tp]) for tp in tps}
        behind = {p: n for p, n in lags.items() if n > 0}
        found.append(GroupLag(group=group, topic=topic, lag=sum(behind.values()), partitions=behind))
    return found


def read_weights(config: Config) -> list[WeightRecord]:
    """Every version of the log, in its order. Raises BrokerError."""
    topic = Topics(config.run.namespace).name(WEIGHTS, config.policy.id)
    with closing(make_consumer(config.kafka, client_id="headrace-audit")) as consumer:
        return [WEIGHT_RECORD.decode(r.value, r.headers) for r in _records(consumer, topic)]


class _Books:
    """One reading of one run."""

    def __init__(self, config: Config, consumer: KafkaConsumer, tell: Callable[[str], object]) -> None:
        self._config, self._consumer, self._tell = config, consumer, tell
        self._topics = Topics(config.run.namespace)
        self._store = BlobStore(config.store_uri)

    def read(self, ledger: Path | None) -> AuditResult:
        audit = Audit(self._committed(), expired=self._expired())
        for record in self._read(WEIGHTS):
            weights = WEIGHT_RECORD.decode(record.value, record.headers)
            refs = samples_of(weights, self._store)
            audit.weights(weights, [(ref.partition, ref.offset) for ref in refs])
        for record in self._read(DEADLETTERS):
            if header(record.headers, SETTLES) is None:
                letter = read_dead_letter(record.headers)
                audit.dead_letter(self._short(letter.topic), letter.partition, letter.offset)
        if ledger is not None:
            with ledger.open() as lines:
                audit.acknowledged(line.strip() for line in lines if line.endswith("\n"))
        for record in self._read(TRAJECTORIES):
            if self._ours(record):
                audit.trajectory(record.partition, record.offset, self._trajectory_id(record))
        for record in self._read(SCORES):
            if self._ours(record):
                audit.score(record.partition, record.offset, self._scored_id(record))
        for record in self._read(SAMPLES):
            audit.sample(record.partition, record.offset, *self._fate(record))
        return audit.result()

    def _ours(self, record: Any) -> bool:
        return header(record.headers, POLICY_HEADER) in (None, self._config.policy.id)

    def _trajectory_id(self, record: Any) -> str | None:
        try:
            value = check_out(record.value, record.headers, store=self._store)
            return TRAJECTORY.decode(value, record.headers).trajectory_id
        except InvalidMessageError:
            return None

    def _scored_id(self, record: Any) -> str | None:
        try:
            return SCORE.decode(record.value, record.headers).trajectory_id
        except InvalidMessageError:
            return None

    def _fate(self, record: Any) -> tuple[str | None, str | None]:
        """(trajectory id, reason of a dropped one). The headers tell an admitted one."""
        name = header(record.headers, TRAJECTORY_HEADER)
        if name is not None and header(record.headers, FATE_HEADER) == Fate.ADMITTED.value:
            return name, None
        try:
            sample = SAMPLE.decode(record.value, record.headers)
        except InvalidMessageError:
            return None, None
        return sample.trajectory_id, sample.reason if sample.fate is Fate.DROPPED else None

    def _committed(self) -> dict[str, dict[int, int]]:
        group = self._topics.group(STREAMS_GROUP)
        found: dict[str, dict[int, int]] = {}
        with closing(
            make_consumer(self._config.kafka, client_id="headrace-audit", group_id=group)
        ) as consumer:
            for spec in (TRAJECTORIES, SCORES):
                tps = partitions_of(consumer, self._topics.name(spec))
                found[spec.topic] = {tp.partition: consumer.committed(tp) or 0 for tp in tps}
        if self._config.feedback.on:
            # A score waits in the join's table after its trajectory was committed: it is not lost before its window ends.
            found[TRAJECTORIES.topic] = {}
        return found

    def _expired(self) -> dict[str, int]:
        found = {}
        for spec in (TRAJECTORIES, SCORES, SAMPLES, WEIGHTS):
            tps = partitions_of(self._consumer, self._name(spec))
            found[spec.topic] = sum(self._consumer.beginning_offsets(tps).values())
        return found

    def _read(self, spec: TopicSpec) -> Iterator[Any]:
        self._tell(f"reading {spec.topic}")
        return _records(self._consumer, self._name(spec))

    def _name(self, spec: TopicSpec) -> str:
        return self._topics.name(spec, self._config.policy.id if spec.per_policy else None)

    def _short(self, topic: str) -> str:
        rest = topic.removeprefix(f"{self._topics.namespace}.")
        return "samples" if rest == f"samples.{self._config.policy.id}" else rest


def _records(consumer: KafkaConsumer, topic: str) -> Iterator[Any]:
    """Every record up to the present end, one partition after the other."""
    tps = partitions_of(consumer, topic)
    ends: dict[TopicPartition, int] = consumer.end_offsets(tps)
    for tp in tps:
        consumer.assign([tp])
        consumer.seek_to_beginning(tp)
        heard = time.monotonic()
        while consumer.position(tp) < ends[tp]:
            records = poll_records(consumer)
            heard = time.monotonic() if records else heard
            if time.monotonic() - heard > SILENT_SECONDS:
                raise BrokerError(
                    f"{tp.topic}-{tp.partition} cannot be read beyond offset {consumer.position(tp)} of {ends[tp]}"
                )
            for record in records:
                if record.offset < ends[tp]:
                    yield record
