"""What `headrace topics ls` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kafka import TopicPartition

from ..schemas.config import Config
from ..schemas.topics import ALL_TOPICS, Topics
from ..streams.kafka import closing, make_consumer


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
