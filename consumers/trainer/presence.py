"""Whether a trainer is at work for a policy: each is a member of a consumer group that reads nothing.

A trainer that is killed or stopped (SIGSTOP) is no member any more once its session has ended. Membership only
tells; what keeps two trainers from writing is the transactional id, so two that start at the same moment and see
nobody still leave one writer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kafka.errors import KafkaError

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError, ConfigError, FencedError, HeadraceError
from ...streams.kafka import closing, make_admin, make_consumer

logger = logging.getLogger(__name__)

SESSION_MS = 10_000
"""After so long without a heartbeat a trainer counts as gone."""


class Presence:
    """A thread that keeps this trainer a member of `group`."""

    def __init__(self, config: KafkaConfig, group: str, topic: str) -> None:
        """`topic`: any that exists; nothing of it is kept."""
        self._config, self._group, self._topic = config, group, topic
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="presence", daemon=True)

    def start(self) -> None:
        """Begin; does nothing on a broker that does not expire dead members."""
        if not self._config.static_members:
            self._thread.start()

    def close(self) -> None:
        """Leave the group."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _main(self) -> None:
        try:
            with closing(self._consumer()) as consumer:
                consumer.subscribe([self._topic])
                while not self._stopping.is_set():
                    consumer.poll(timeout_ms=500)
                    consumer.pause(*consumer.assignment())
        except (KafkaError, HeadraceError) as e:
            logger.warning("a trainer started with --refuse will not see this one: %s", e)

    def _consumer(self) -> Any:
        return make_consumer(
            self._config,
            client_id=self._group,
            group_id=self._group,
            auto_offset_reset="latest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=SESSION_MS // 5,
        )


def members_of(config: KafkaConfig, group: str) -> list[str]:
    """The hosts of the group's members. Raises BrokerError."""
    try:
        with closing(make_admin(config)) as admin:
            described = admin.describe_groups([group])[group]
    except KafkaError as e:
        raise BrokerError(f"the group {group} cannot be described: {e}") from e
    if described["group_state"] == "Dead":  # as Kafka says of a group that never was
        return []
    if described["error"]:
        raise BrokerError(f"the group {group} cannot be described: {described['error']}")
    return [str(member["client_host"]).lstrip("/") for member in described["members"]]


def refuse_second(
    config: KafkaConfig,
    group: str,
    policy_id: str,
    *,
    sleep: Callable[[float], object] = time.sleep,
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Return once no trainer is a member of `group`; FencedError when one still is after a whole session.

    So a trainer that was killed a moment ago does not count. Raises BrokerError; ConfigError on a broker that
    does not expire dead members.
    """
    if config.static_members:
        raise ConfigError(
            "trainer.second = 'refuse' (--refuse) needs a broker that notices dead trainers: the embedded one does not. "
            "Use Apache Kafka, or 'fence'"
        )
    deadline = now() + SESSION_MS / 1000 + 2.0
    while members := members_of(config, group):
        if now() > deadline:
            raise FencedError(
                f"a trainer is at work for policy {policy_id!r} (on {', '.join(members)}); stop it, or start this one "
                "with trainer.second = 'fence' (without --refuse) to take over from it"
            )
        sleep(0.5)
