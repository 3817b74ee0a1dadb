"""Where every stage is, read from Kafka alone: position, lag in records, age of the oldest unread one, version.

Works on any run whose broker answers, with nothing else installed or running.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kafka import KafkaConsumer, TopicPartition

from ..schemas.codec import VERSION_MAX_HEADER, header
from ..schemas.config import Config
from ..schemas.deadletter import OpenLetters
from ..schemas.engine import ENGINE, EngineStatus
from ..schemas.errors import InvalidMessageError
from ..schemas.topics import DEADLETTERS, ENGINES, SAMPLES, SCORES, TRAJECTORIES, WEIGHTS, Topics
from ..schemas.weights import WEIGHTS as WEIGHT_RECORD
from ..schemas.weights import WeightRecord
from .kafka import closing, make_consumer

STREAMS_GROUP = "streams"
TRAINER_GROUP = "trainer"
READ_SECONDS = 3.0
LETTERS_READ = 2000
"""Offsets of the deadletters topic that are looked at one by one."""
"""Limit of one look at the ends of a topic."""
ENGINE_RECORDS = 2000
"""How far back the statuses of engines are looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One stage that reads a topic."""

    stage: str
    topic: str
    position: int
    """Records finished with, over all partitions (the sum of committed offsets)."""
    lag_records: int
    oldest_age_s: float
    """Seconds since the oldest unfinished record was appended; 0.0 when there is none."""
    version: int | None
    """Newest policy version the stage has come to; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One look at a run."""

    at_ms: int
    namespace: str
    policy_id: str
    bootstrap: str
    stages: tuple[StageStatus, ...]
    engines: tuple[EngineStatus, ...]
    version: int | None
    """Newest on the weights topic."""
    version_age_s: float | None
    metrics: Mapping[str, float]
    """Of the newest version's step."""
    dead_letters: int

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            **{name: getattr(self, name) for name in ("at_ms", "namespace", "policy_id", "bootstrap")},
            "version": self.version,
            "version_age_s": self.version_age_s,
            "stages": {s.stage: asdict(s) for s in self.stages},
            "engines": [asdict(e) | {"state": e.state.value} for e in self.engines],
            "metrics": dict(self.metrics),
            "dead_letters": self.dead_letters,
        }


@dataclass(frozen=True, slots=True)
class _Head:
    """The record at a stage's position in one partition, and the one before it."""

    next_timestamp_ms: int | None
    """Append time of the first unfinished record."""
    version: int | None
    """Its policy version header, or that of the last finished one."""


def snapshot(config: Config, *, now_ms: int | None = None) -> Status:
    """Look at the run that `config` describes; BrokerUnreachableError when nothing answers.

    A topic that does not exist yet counts as empty.
    """
    topics = Topics(config.run.namespace)
    policy = config.policy.id
    now = now_ms if now_ms is not None else int(time.time() * 1000)
    streams, trainer = topics.group(STREAMS_GROUP), topics.group(TRAINER_GROUP, policy)
    with closing(make_consumer(config.kafka, client_id="headrace-status")) as consumer:
        weights = _last_weights(consumer, topics.name(WEIGHTS, policy))
        engines = _engines(consumer, topics.name(ENGINES), policy)
        dead = _open_letters(consumer, topics.name(DEADLETTERS))
    version = weights.version if weights is not None else None
    stages = (
        _stage(config, "verify", topics.name(TRAJECTORIES), streams, now),
        _stage(config, "advantage", topics.name(SCORES), streams, now),
        _stage(config, "trainer", topics.name(SAMPLES, policy), trainer, now, version=version),
        _engine_stage(engines, topics.name(WEIGHTS, policy), weights, now),
    )
    return Status(
        at_ms=now,
        namespace=topics.namespace,
        policy_id=policy,
        bootstrap=config.kafka.bootstrap or "",
        stages=stages,
        engines=engines,
        version=version,
        version_age_s=_age(now, weights.created_ms) if weights is not None else None,
        metrics=weights.metrics if weights is not None else {},
        dead_letters=dead,
    )


def _stage(
    config: Config, stage: str, topic: str, group: str, now: int, *, version: int | None = None
) -> StageStatus:
    with closing(make_consumer(config.kafka, client_id="headrace-status", group_id=group)) as consumer:
        tps = _partitions(consumer, topic)
        ends, begins = _ends(consumer, tps), consumer.beginning_offsets(tps) if tps else {}
        committed = {tp: max(consumer.committed(tp) or 0, begins[tp]) for tp in tps}
        heads = _heads(consumer, committed, begins, ends)
    lag = {tp: max(0, ends[tp] - committed[tp]) for tp in tps}
    oldest = [h.next_timestamp_ms for h in heads.values() if h.next_timestamp_ms is not None]
    versions = [h.version for h in heads.values() if h.version is not None]
    return StageStatus(
        stage=stage,
        topic=topic,
        position=sum(committed.values()),
        lag_records=sum(lag.values()),
        oldest_age_s=_age(now, min(oldest)) if oldest else 0.0,
        version=version if version is not None else max(versions, default=None),
    )


def _heads(
    consumer: KafkaConsumer,
    committed: Mapping[TopicPartition, int],
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, _Head]:
    """What lies at each position. One record before it is read too, for the version of a stage without lag."""
    wanted = [tp for tp in committed if ends[tp] > begins[tp]]
    starts = {tp: max(begins[tp], committed[tp] - 1) for tp in wanted}
    heads: dict[TopicPartition, _Head] = {}
    for tp, records in _read(consumer, starts, ends).items():
        unread = next((r for r in records if r.offset >= committed[tp]), None)
        last = unread if unread is not None else records[-1]
        text = header(last.headers, VERSION_MAX_HEADER)
        heads[tp] = _Head(
            unread.timestamp if unread is not None else None,
            int(text) if text is not None and text.isdigit() else None,
        )
    return heads


def _read(
    consumer: KafkaConsumer, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> dict[TopicPartition, list[Any]]:
    """Some records of each partition from its start on: at least two, or all there are."""
    found: dict[TopicPartition, list[Any]] = {tp: [] for tp in starts}
    if not starts:
        return {}
    consumer.assign(list(starts))
    for tp, offset in starts.items():
        consumer.seek(tp, offset)
    deadline = time.monotonic() + READ_SECONDS
    waiting = set(starts)
    while waiting and time.monotonic() < deadline:
        for tp, records in consumer.poll(100).items():
            found[tp] += records
        waiting = {tp for tp in waiting if len(found[tp]) < 2 and consumer.position(tp) < ends[tp]}
        consumer.pause(*(set(starts) - waiting))
    return {tp: records for tp, records in found.items() if records}


def _last_weights(consumer: KafkaConsumer, topic: str) -> WeightRecord | None:
    records = _tail(consumer, topic, count=8)
    for record in reversed(records):
        try:
            return WEIGHT_RECORD.decode(record.value, record.headers)
        except InvalidMessageError:
            continue
    return None


def _engines(consumer: KafkaConsumer, topic: str, policy: str) -> tuple[EngineStatus, ...]:
    newest: dict[str, EngineStatus] = {}
    for record in _tail(consumer, topic, count=ENGINE_RECORDS):
        if record.value is None:
            continue
        try:
            status = ENGINE.decode(record.value, record.headers)
        except InvalidMessageError:
            continue
        if status.policy_id == policy:
            newest[status.engine_id] = status
    return tuple(newest[key] for key in sorted(newest))


def _engine_stage(
    engines: tuple[EngineStatus, ...], topic: str, weights: WeightRecord | None, now: int
) -> StageStatus:
    """The engines as one stage that follows the weights topic: it is where its slowest member is."""
    live = [e.version for e in engines if e.state.value != "stopped"]
    slowest = min(live, default=None)
    behind = weights is not None and slowest is not None and weights.version > slowest
    return StageStatus(
        stage="engines",
        topic=topic,
        position=slowest + 1 if slowest is not None else 0,
        lag_records=max(0, weights.version - slowest) if weights is not None and slowest is not None else 0,
        oldest_age_s=_age(now, weights.created_ms) if weights is not None and behind else 0.0,
        version=slowest,
    )


def _tail(consumer: KafkaConsumer, topic: str, *, count: int) -> list[Any]:
    """The last `count` offsets' records of a topic with one partition."""
    tps = _partitions(consumer, topic)
    if not tps:
        return []
    tp, end = tps[0], _ends(consumer, tps)[tps[0]]
    start = max(consumer.beginning_offsets([tp])[tp], end - count)
    consumer.assign([tp])
    consumer.seek(tp, start)
    found: list[Any] = []
    deadline = time.monotonic() + READ_SECONDS
    while consumer.position(tp) < end and time.monotonic() < deadline:
        for records in consumer.poll(100).values():
            found += records
    return found


def _open_letters(consumer: KafkaConsumer, topic: str) -> int:
    """Letters that nobody has settled; those before the newest records are taken for open ones."""
    tps = _partitions(consumer, topic)
    if not tps:
        return 0
    begin, end = consumer.beginning_offsets(tps)[tps[0]], _ends(consumer, tps)[tps[0]]
    found = OpenLetters()
    for record in _tail(consumer, topic, count=LETTERS_READ):
        found.take(record.offset, record.headers)
    return max(0, end - begin - LETTERS_READ) + len(found)


def _partitions(consumer: KafkaConsumer, topic: str) -> list[TopicPartition]:
    return [TopicPartition(topic, p) for p in sorted(consumer.partitions_for_topic(topic) or ())]


def _ends(consumer: KafkaConsumer, tps: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    tps = list(tps)
    return dict(consumer.end_offsets(tps)) if tps else {}


def _age(now: int, then: int) -> float:
    return max(0.0, (now - then) / 1000)
