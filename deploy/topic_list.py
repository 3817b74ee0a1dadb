"""What `headrace topics ls` and `headrace deadletters ls` show."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from kafka import TopicPartition

from ..schemas.config import Config
from ..schemas.deadletter import read_dead_letter
from ..schemas.topics import ALL_TOPICS, DEADLETTERS, Topics
from ..streams.kafka import closing, make_consumer

READ_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfo:
    """One topic of the table."""

    name: str
    exists: bool
    partitions: int
    records: int
    """Between the first kept offset and the end, over all partitions; transaction markers count."""
    first_offset: int

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def list_topics(config: Config) -> list[TopicInfo]:
    """Every topic of the namespace and policy, in the order of the table."""
    topics, found = Topics(config.run.namespace), []
    with closing(make_consumer(config.kafka, client_id="headrace-topics")) as consumer:
        for spec in ALL_TOPICS:
            name = topics.name(spec, config.policy.id if spec.per_policy else None)
            tps = [TopicPartition(name, p) for p in consumer.partitions_for_topic(name) or ()]
            begins, ends = (consumer.beginning_offsets(tps), consumer.end_offsets(tps)) if tps else ({}, {})
            found.append(
                TopicInfo(
                    name=name,
                    exists=bool(tps),
                    partitions=len(tps),
                    records=sum(ends.values()) - sum(begins.values()),
                    first_offset=sum(begins.values()),
                )
            )
    return found


def list_dead_letters(config: Config, *, limit: int) -> list[dict[str, Any]]:
    """The newest `limit` dead letters, oldest first."""
    name, found = Topics(config.run.namespace).name(DEADLETTERS), []
    with closing(make_consumer(config.kafka, client_id="headrace-deadletters")) as consumer:
        if not consumer.partitions_for_topic(name):
            return []
        tp = TopicPartition(name, 0)
        end = consumer.end_offsets([tp])[tp]
        consumer.assign([tp])
        consumer.seek(tp, max(consumer.beginning_offsets([tp])[tp], end - limit))
        deadline = time.monotonic() + READ_SECONDS
        while consumer.position(tp) < end and time.monotonic() < deadline:
            for records in consumer.poll(200).values():
                found += records
    letters = []
    for record in found:
        letter = asdict(read_dead_letter(record.headers))
        letters.append({**letter, "offset": record.offset, "source_offset": letter["offset"]})
    return letters
