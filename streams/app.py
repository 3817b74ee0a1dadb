"""The Faust app: verify and advantage in one consumer group, with the safe parts installed."""

from __future__ import annotations

import ssl
import time
from typing import Any

import faust

from ..schemas.config import Config, KafkaConfig
from ..schemas.errors import ConfigError
from ..schemas.topics import FEEDBACK, SCORES, TRAJECTORIES, Topics
from . import metrics
from .advantage import TICK_SECONDS, Advantage
from .blobs import BlobStore
from .broker_clock import BrokerClock
from .feedback import TICK_SECONDS as FEEDBACK_TICK_SECONDS
from .feedback import FeedbackJoin
from .gate import VersionBook, VersionFollower
from .holes import look_with
from .kafka import MAX_REQUEST
from .outbox import Outbox
from .quiet_monitor import QuietMonitor
from .safe_faust import SafeTableManager, install
from .verify import Verify

ROLE = "streams"
COMMIT_SECONDS = 0.5
FETCH_BYTES = 2 * 1024 * 1024
"""Of one partition at once; a larger record still comes. All that was fetched is handed over before anything newer:
many megabytes of trajectories would keep the scores waiting. Half of it halves the throughput of a backlog."""
BATCH_BYTES = 256 * 1024
"""The client's own 16 KiB would be three records: an Arrow stream of one row is mostly schema until it is compressed."""
BUFFERED_RECORDS = 512
"""Per stream: what is fetched and not yet looked at."""


class StreamsApp(faust.App):
    """A Faust app with its stages beside it."""

    verify_stage: Verify
    advantage_stage: Advantage
    feedback_join: FeedbackJoin | None = None
    """None where no score waits for outcomes."""
    follower: VersionFollower
    clock: BrokerClock


def create_app(config: Config) -> StreamsApp:
    """The app of one streams worker, not yet started. Raises ConfigError."""
    topics = Topics(config.run.namespace)
    app = StreamsApp(topics.group(ROLE), **_settings(config, topics))
    install(app, look_with(config.kafka))
    outbox = Outbox(app)
    app.clock = outbox.clock
    app.follower = VersionFollower(config.kafka, topics, VersionBook())
    if config.feedback.on:
        app.feedback_join = FeedbackJoin(config.feedback, topics, outbox, app)
    app.verify_stage = Verify(config, topics, outbox, BlobStore(config.store_uri), join=app.feedback_join)
    app.advantage_stage = Advantage(config, topics, outbox, app, app.follower)
    _add_agents(app, topics)
    return app


def _add_agents(app: StreamsApp, topics: Topics) -> None:
    def raw(name: str) -> Any:
        return app.topic(name, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

    @app.agent(raw(topics.name(TRAJECTORIES)), name="verify")
    async def verify(stream: Any) -> None:
        await app.verify_stage.run(stream)

    @app.agent(raw(topics.name(SCORES)), name="advantage")
    async def advantage(stream: Any) -> None:
        await app.advantage_stage.run(stream)

    if (join := app.feedback_join) is not None:

        @app.agent(raw(topics.name(FEEDBACK)), name="feedback")
        async def feedback(stream: Any) -> None:
            await join.run(stream)

        @app.timer(interval=FEEDBACK_TICK_SECONDS)
        async def settle() -> None:
            await join.tick(app.clock.at(int(time.time() * 1000)))

    @app.timer(interval=TICK_SECONDS)
    async def close_groups() -> None:
        metrics.clock_skew_seconds.set(-app.clock.ahead_ms / 1000)
        await app.advantage_stage.tick(app.clock.at(int(time.time() * 1000)))


def _settings(config: Config, topics: Topics) -> dict[str, Any]:
    if config.kafka.bootstrap is None:
        raise ConfigError("kafka.bootstrap is not set: give host:port, or let `headrace up` start a broker")
    data = config.run.dir / "faust"
    data.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "broker": ";".join(f"kafka://{address}" for address in config.kafka.bootstrap.split(",")),
        "datadir": data,
        "store": "memory://",
        "autodiscover": False,
        "web_enabled": False,
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "TableManager": SafeTableManager,
        "Monitor": QuietMonitor,
        "stream_wait_empty": False,
        "stream_buffer_maxsize": BUFFERED_RECORDS,
        "broker_session_timeout": 6.0,
        "broker_heartbeat_interval": 1.0,
        "broker_commit_interval": COMMIT_SECONDS,
        "consumer_auto_offset_reset": "earliest",
        "consumer_max_fetch_size": FETCH_BYTES,
        "producer_max_request_size": MAX_REQUEST,
        "producer_acks": -1,
        "producer_compression_type": "zstd",
        "producer_linger": 0.02,
        "producer_max_batch_size": BATCH_BYTES,
        "broker_credentials": _credentials(config.kafka),
    }
    if config.kafka.static_members:
        settings["consumer_group_instance_id"] = f"{topics.group(ROLE)}-0"
    return settings


def _credentials(kafka: KafkaConfig) -> Any:
    if kafka.security_protocol == "PLAINTEXT":
        return None
    context = None
    if kafka.security_protocol.endswith("SSL"):
        context = ssl.create_default_context(cafile=str(kafka.ssl_cafile) if kafka.ssl_cafile else None)
    if kafka.security_protocol == "SSL":
        return faust.SSLCredentials(context)
    password = kafka.sasl_password
    return faust.SASLCredentials(
        username=kafka.sasl_username,
        password=password.get_secret_value() if password is not None else None,
        ssl_context=context,
        mechanism=kafka.sasl_mechanism,
    )
