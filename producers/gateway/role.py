"""The gateway role: HTTP in and out on one loop, engines from the log, finished rollouts to it.

thread            does                                                   ends when
main              asyncio: HTTP, sampling, publishing, idle rollouts     SIGTERM, SIGINT, or another ended
engine-reader     reads the engines topic                                asked to
kafka producer    sends; tells the loop of acknowledgements              closed

On SIGTERM: take no more requests -> finish every open rollout into the spool -> flush what Kafka takes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from dataclasses import replace
from typing import Any

from ...schemas import topics as t
from ...schemas.config import Config
from ...schemas.errors import ConfigError
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.kafka import make_producer
from ..engines.client import HttpEngineClient
from ..engines.server import HttpServer, at_once, url_of
from ..rollout.engine_pool import EnginePool
from ..rollout.publisher import Outgoing, Publisher
from .app import GatewayApp
from .delivery import Delivery, FeedbackSender, already_sent
from .engines import EngineReader
from .errors import RequestError
from .gateway import Gateway, make_sessions
from .keys import KeyRing, check_address, load_keys
from .limits import Limits
from .loading import load_chat_model
from .model import ChatModel
from .models import Models
from .outcomes import Outcomes
from .rollouts import Rollouts
from .sampler import Sampler
from .spool import Spool
from .tree import Thinking

logger = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 1.0
FLUSH_SECONDS = 10.0


def main(config: Config, gateway_id: str = "gateway-0") -> int:
    """Serve until SIGTERM or SIGINT; the exit status. Raises ConfigError, BrokerError."""
    t.checked_name(gateway_id, what="gateway id")
    settings = config.gateway
    keys = load_keys(settings.keys_file, policy=config.policy.id)
    check_address(settings.host, keys)
    model, context = load_chat_model(config.policy.model, opening=tuple(settings.opening))
    spool = Spool(
        settings.spool_dir or config.run.dir / "gateway-spool", most_bytes=settings.spool_mb * 1024 * 1024
    )
    metrics.serve(config.metrics.host, config.metrics.port)
    with _listening(settings.host, settings.port) as listening:
        role = _Role(config, gateway_id, keys, model, context, spool)
        return asyncio.run(role.run(listening))


class _Role:
    """One process's state."""

    def __init__(
        self, config: Config, gateway_id: str, keys: KeyRing, model: ChatModel, context: int, spool: Spool
    ) -> None:
        self._config, self._id, self._keys = config, gateway_id, keys
        self._model, self._context, self._spool = model, context, spool
        self._topics = t.Topics(config.run.namespace)
        self._store = BlobStore(config.store_uri)
        self._group_ms = int(config.rollout.group_seconds * 1000)
        self._failure: BaseException | None = None

    async def run(self, listening: socket.socket) -> int:
        settings = self._config.gateway
        producer = await asyncio.to_thread(make_producer, self._config.kafka, client_id=self._id)
        topic = self._topics.name(t.TRAJECTORIES)
        for name in (topic, self._topics.name(t.FEEDBACK)):
            await asyncio.to_thread(producer.partitions_for, name)  # else the first send blocks the loop
        publisher = Publisher(
            producer,
            topic,
            store=self._store,
            inline_max=self._config.store.inline_max_bytes,
            done=self._acknowledged,
            now_ms=_now_ms,
        )
        delivery = Delivery(self._spool, publisher, now_ms=_now_ms)
        await self._recover(delivery, topic)
        pool = EnginePool(self._config.policy.id, HttpEngineClient)
        make = make_sessions(
            self._model, self._config.policy.id, thinking=Thinking(settings.thinking), on_branch=_count_branch
        )
        rollouts = Rollouts(make, most=settings.max_rollouts, refuse=self._spool.full)
        gateway = Gateway(
            self._model,
            Sampler(pool, patience=settings.patience_seconds),
            rollouts,
            delivery.publish,
            limits=self._limits(),
            temperature=settings.temperature,
            group_ms=self._group_ms,
        )
        outcomes = Outcomes(gateway, FeedbackSender(producer, self._topics).send, kept=self._spool.waiting)
        models = Models(self._config.policy.id, settings.models)
        app = GatewayApp(
            gateway, self._keys, models, outcomes, keepalive=settings.keepalive_seconds, count=_count
        )
        server = HttpServer(app.app)
        loop = asyncio.get_running_loop()

        def fail(error: BaseException) -> None:
            logger.error("the gateway ends", exc_info=error)
            self._failure = self._failure or error
            server.should_exit = True

        reader = EngineReader(
            self._config.kafka, self._topics, pool, client_id=f"{self._id}-reader", failed=fail
        )
        reader.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
        idle = loop.create_task(self._end_idle(gateway, outcomes))
        metrics.role_up.labels(role="gateway").set(1)
        logger.info("gateway serves url=%s policy=%s", url_of(listening), self._config.policy.id)
        try:
            await server.serve(sockets=[listening])
            idle.cancel()
            for rollout in rollouts.idle(0.0):
                await _quietly(outcomes.end(rollout))
            missing = await publisher.flush(FLUSH_SECONDS)
        finally:
            metrics.role_up.labels(role="gateway").set(0)
            await asyncio.to_thread(reader.stop)
            await pool.close()
            await asyncio.to_thread(producer.close, timeout=FLUSH_SECONDS)
        if self._failure is not None:
            raise self._failure
        if missing:
            logger.warning("rollouts wait in the spool for the next start count=%d", len(self._spool))
        return 0

    def _limits(self) -> Limits:
        settings = self._config.gateway
        return Limits(
            body_bytes=settings.max_body_bytes,
            messages=settings.max_messages,
            context_tokens=settings.context_tokens or self._context,
            turn_tokens=settings.max_tokens,
            in_flight=settings.max_in_flight,
        )

    async def _recover(self, delivery: Delivery, topic: str) -> None:
        """What an earlier process has left in the spool, unless Kafka has it already."""
        left = self._spool.recover()
        since = self._spool.oldest_ms()
        if since is None:
            return
        sent = await asyncio.to_thread(
            already_sent, self._config.kafka, topic, self._store, left, since_ms=since
        )
        for trajectory in left:
            if trajectory.trajectory_id in sent:
                self._spool.acknowledged(trajectory)
        # Its time for a score begins now, not when the process was killed.
        deadline = _now_ms() + self._group_ms
        again = [replace(x, group_deadline_ms=deadline) for x in left if x.trajectory_id not in sent]
        logger.info("spooled trajectories found=%d in_the_topic=%d", len(left), len(sent))
        await delivery.send(again)

    async def _end_idle(self, gateway: Gateway, outcomes: Outcomes) -> None:
        while True:
            await asyncio.sleep(IDLE_POLL_SECONDS)
            for rollout in gateway.rollouts.idle(self._config.gateway.idle_seconds):
                await _quietly(outcomes.end(rollout))
            metrics.gateway_in_flight.set(gateway.in_flight)
            metrics.gateway_rollouts_open.set(len(gateway.rollouts))
            metrics.gateway_spool_rollouts.set(len(self._spool))
            metrics.gateway_spool_bytes.set(self._spool.size)

    def _acknowledged(self, out: Outgoing) -> None:
        self._spool.acknowledged(out.trajectory)
        metrics.gateway_trajectories.labels(status=out.trajectory.status.value).inc()


async def _quietly(ending: Any) -> None:
    try:
        await ending
    except RequestError as e:  # the disk is full: the rollout stays open, and is tried again
        logger.error("a rollout cannot be ended: %s", e)


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return at_once(socket.create_server((host, port), family=family, backlog=1024))
    except OSError as e:
        raise ConfigError(
            f"gateway.port {port} on {host} cannot be used ({e.strerror}); choose another, or 0 for a free one"
        ) from None


def _count(api: str, status: int) -> None:
    metrics.gateway_requests.labels(api=api, status=str(status)).inc()


def _count_branch(reason: Any) -> None:
    metrics.gateway_branches.labels(reason=reason.value).inc()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
