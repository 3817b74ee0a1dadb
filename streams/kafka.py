"""kafka-python clients with the settings that hold (acks=all, idempotent, whole frames, quick retries).

Faust brings its own client (aiokafka); everything else in headrace talks to Kafka through these.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError, TopicAlreadyExistsError

from ..schemas.config import KafkaConfig
from ..schemas.errors import BrokerError, BrokerUnreachableError, ConfigError
from ..schemas.topics import ALL_TOPICS, Topics
from . import lenient_names

logger = logging.getLogger(__name__)

MAX_FRAME = 2**31 - 1
"""The embedded broker ignores fetch limits and may answer a whole backlog at once."""
MAX_REQUEST = 8 * 1024 * 1024
NODE_SECONDS = 5.0
"""How long other nodes are asked about a topic after one was away."""
LEADERS_SECONDS = 30.0
"""How long the leader of a partition may stay unknown."""


def client_settings(config: KafkaConfig) -> dict[str, Any]:
    """Connection settings that every kafka-python client shares; ConfigError without a bootstrap address."""
    if config.bootstrap is None:
        raise ConfigError("kafka.bootstrap is not set: give host:port, or let `headrace up` start a broker")
    settings: dict[str, Any] = {
        "bootstrap_servers": config.bootstrap.split(","),
        "security_protocol": config.security_protocol,
        "receive_message_max_bytes": MAX_FRAME,
        "retry_backoff_ms": 10,
        "reconnect_backoff_ms": 50,
        "reconnect_backoff_max_ms": 1000,
        "bootstrap_timeout_ms": 10_000,
        # A broker that has just come back may answer that no partition has a leader yet, and kafka-python believes
        # that until its metadata are too old.
        "metadata_max_age_ms": 5_000,
    }
    if config.ssl_cafile is not None:
        settings["ssl_cafile"] = str(config.ssl_cafile)
    if config.sasl_mechanism is not None:
        settings["sasl_mechanism"] = config.sasl_mechanism
        settings["sasl_plain_username"] = config.sasl_username
        settings["sasl_plain_password"] = (
            config.sasl_password.get_secret_value() if config.sasl_password is not None else None
        )
    return settings


def _connect(make: Callable[..., Any], config: KafkaConfig, **settings: Any) -> Any:
    try:
        return make(**{**client_settings(config), **settings})
    except (KafkaTimeoutError, KafkaConnectionError) as e:
        raise BrokerUnreachableError(
            f"no Kafka broker answers at {config.bootstrap} ({e}): is the broker running? Its address is "
            "kafka.bootstrap (--bootstrap); without one, `headrace up` and `headrace demo` start a local broker"
        ) from None


def make_producer(config: KafkaConfig, *, client_id: str, **settings: Any) -> KafkaProducer:
    """An idempotent producer that waits for all replicas."""
    return _connect(
        KafkaProducer,
        config,
        **{
            "client_id": client_id,
            "acks": "all",
            "enable_idempotence": True,
            "linger_ms": 2,
            # An Arrow stream of one row is mostly schema and padding: a fifth of the bytes, for no time.
            "compression_type": "zstd",
            "max_request_size": MAX_REQUEST,
            **settings,
        },
    )


class Consumer(KafkaConsumer):
    """kafka-python's; it breaks with KeyError where it knows the leaders of some of the partitions only, and asks one
    node about a topic, which may be the one that is away."""

    def partitions_for_topic(self, topic: str) -> Any:
        """The numbers of its partitions; None without them."""
        deadline = time.monotonic() + NODE_SECONDS
        while True:
            try:
                return super().partitions_for_topic(topic)
            except KafkaError as e:
                if not e.retriable or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def beginning_offsets(self, partitions: Any, timeout_ms: int | None = None) -> Any:
        """The first offset of each partition."""
        return _of_all(super().beginning_offsets, partitions, timeout_ms)

    def end_offsets(self, partitions: Any, timeout_ms: int | None = None) -> Any:
        """The offset after the last record of each partition."""
        return _of_all(super().end_offsets, partitions, timeout_ms)


def _of_all(ask: Callable[..., Any], partitions: Any, timeout_ms: int | None) -> Any:
    deadline = time.monotonic() + (LEADERS_SECONDS if timeout_ms is None else timeout_ms / 1000)
    while True:
        try:
            return ask(partitions, timeout_ms)
        except KeyError as e:
            if time.monotonic() > deadline:
                raise KafkaTimeoutError(f"no leader is known for {e}") from e
            time.sleep(0.05)


def make_consumer(
    config: KafkaConfig, *, client_id: str, group_id: str | None = None, **settings: Any
) -> KafkaConsumer:
    """A consumer that commits nothing by itself and sees committed transactions only.

    read_committed also makes reads of committed offsets wait for a transaction that is still being finished:
    without it a reader that takes over gets old offsets in 16 to 86 of 100 cases.
    """
    lenient_names.install()
    return _connect(
        Consumer,
        config,
        **{
            "client_id": client_id,
            "group_id": group_id,
            "enable_auto_commit": False,
            "auto_offset_reset": "earliest",
            "isolation_level": "read_committed",
            "fetch_max_wait_ms": 100,
            "max_partition_fetch_bytes": MAX_REQUEST,
            **settings,
        },
    )


def make_admin(config: KafkaConfig, *, client_id: str = "headrace-admin") -> KafkaAdminClient:
    """An admin client."""
    return _connect(KafkaAdminClient, config, client_id=client_id)


def partitions_of(consumer: KafkaConsumer, topic: str, *, timeout_s: float = 30.0) -> list[TopicPartition]:
    """All partitions of `topic`; BrokerError if it does not exist after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            numbers = consumer.partitions_for_topic(topic)
        except KafkaError as e:
            # A node that was lost while it was asked; another one is asked next.
            if not e.retriable or time.monotonic() > deadline:
                raise
            numbers = None
        if numbers:
            return [TopicPartition(topic, p) for p in sorted(numbers)]
        if time.monotonic() > deadline:
            raise BrokerError(f"topic {topic} does not exist; `headrace topics create` makes it")
        time.sleep(0.1)


def create_topics(
    config: KafkaConfig,
    topics: Topics,
    policies: Iterable[str],
    *,
    settings: Mapping[str, Mapping[str, str]] | None = None,
) -> list[str]:
    """Create what is missing from the table in schemas/topics.py; returns the names created.

    `settings` maps a topic of the table ("scores") to Kafka settings over the table's. Topics that exist are
    left as they are. Raises BrokerError when the broker refuses one.
    """
    policies = list(policies)
    wanted = {}
    for spec in ALL_TOPICS:
        names = [topics.name(spec, p) for p in policies] if spec.per_policy else [topics.name(spec)]
        wanted.update({name: spec for name in names})
    admin = make_admin(config)
    try:
        missing = sorted(set(wanted) - set(admin.list_topics()))
        created = []
        for name in missing:
            spec = wanted[name]
            configs = {**spec.configs, **(settings or {}).get(spec.topic, {})}
            new = NewTopic(name, spec.partitions, config.replication_factor, topic_configs=configs)
            try:
                admin.create_topics([new])
                created.append(name)
            except TopicAlreadyExistsError:
                continue
            except KafkaError as e:
                raise BrokerError(f"topic {name} cannot be created: {e}") from e
        return created
    finally:
        admin.close()


def poll_records(
    consumer: KafkaConsumer, *, idle: Callable[[float], Any] = time.sleep, idle_seconds: float = 0.03
) -> list[Any]:
    """What has arrived, in the order of each partition; `idle(idle_seconds)` is called where nothing has.

    The embedded broker answers empty fetches at once, without waiting: a consumer that waits in poll() would
    ask it without a pause and burn a third of a core.
    """
    batches = consumer.poll(timeout_ms=0)
    if not batches:
        idle(idle_seconds)
    return [record for batch in batches.values() for record in batch]


@contextlib.contextmanager
def closing(client: Any) -> Any:
    """Closes a client at the end of a `with` block."""
    try:
        yield client
    finally:
        client.close()
