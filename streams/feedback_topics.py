"""The topics of the feedback join: outcomes must lie in the partition of their trajectory.

Both topics are keyed by rollout_id, and kafka-python, aiokafka and the Java client hash a key alike, so equal
partition counts are enough. The table's changelog has as many partitions, and is compacted.
"""

from __future__ import annotations

from kafka.admin import NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError

from ..schemas.config import KafkaConfig
from ..schemas.errors import BrokerError, ConfigError
from ..schemas.topics import FEEDBACK, MIB, TRAJECTORIES, Topics
from .feedback import TABLE
from .kafka import closing, make_admin, make_consumer, partitions_of

CHANGELOG_CONFIGS = {"cleanup.policy": "compact", "max.message.bytes": str(MIB)}


def prepare_feedback_topics(config: KafkaConfig, topics: Topics) -> None:
    """Make the changelog where it is missing. Raises ConfigError for partition counts that differ, BrokerError."""
    trajectories, feedback = topics.name(TRAJECTORIES), topics.name(FEEDBACK)
    changelog = topics.changelog("streams", TABLE)
    with closing(make_consumer(config, client_id="headrace-feedback")) as consumer:
        count = len(partitions_of(consumer, trajectories))
        _check(feedback, len(partitions_of(consumer, feedback)), trajectories, count)
        with closing(make_admin(config)) as admin:
            try:
                admin.create_topics(
                    [NewTopic(changelog, count, config.replication_factor, topic_configs=CHANGELOG_CONFIGS)]
                )
            except TopicAlreadyExistsError:
                pass
            except KafkaError as e:
                raise BrokerError(f"topic {changelog} cannot be created: {e}") from e
        _check(changelog, len(partitions_of(consumer, changelog)), trajectories, count)


def _check(topic: str, count: int, trajectories: str, wanted: int) -> None:
    if count != wanted:
        raise ConfigError(
            f"topic {topic} has {count} partitions and {trajectories} has {wanted}: outcomes would not meet their "
            "trajectories; give both as many (a new run.namespace makes them so), or switch feedback off"
        )
