"""The engine role: one engine, its HTTP interface, and the subscriber that keeps it on the newest weights.

thread            does                                                      ends when
main              asyncio: HTTP in and out                                  SIGTERM, SIGINT, or another ended
weight-subscriber polls the weights topic; stages and swaps; status         asked to
(the engine's)    samples                                                   the engine is closed
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import threading
import time
from typing import Any

from ...schemas.config import Config
from ...schemas.errors import ConfigError
from ...streams import metrics
from ...streams.blobs import BlobStore
from .feed import StatusProducer, WeightsFeed
from .pauses import Pauses
from .protocol import Engine
from .scripted import ScriptedEngine
from .server import EngineServer, HttpServer, bind, url_of
from .subscriber import WeightSubscriber

logger = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 3.0
LOOK_BACK_SECONDS = (1.0, 60.0)
"""Between readings of the whole topic in search of a version that is not there: the first, doubled, and the longest."""


def main(config: Config, engine_id: str = "engine-0") -> int:
    """Serve until SIGTERM or SIGINT. Exit status 1: the engine or the subscriber ended by itself."""
    listening = bind(config.engine.host, config.engine.port)
    engine = make_engine(config, engine_id)
    pauses = Pauses(engine)
    status = None
    try:
        metrics.serve(config.metrics.host, config.metrics.port)
        status = StatusProducer(config, engine_id)
        subscriber = WeightSubscriber(
            engine,
            BlobStore(config.store_uri),
            engine_id=engine_id,
            policy_id=config.policy.id,
            url=url_of(listening),
            publish=status.publish,
            pauses=pauses,
        )
        following = Following(subscriber, lambda: WeightsFeed(config, engine_id, status))
        app = EngineServer(engine, info=lambda: _facts(subscriber), pauses=pauses).app
        metrics.role_up.labels(role="engine").set(1)
        logger.info("engine serves engine_id=%s url=%s", engine_id, url_of(listening))
        return asyncio.run(_serve(HttpServer(app), listening, engine, following, pauses))
    finally:
        metrics.role_up.labels(role="engine").set(0)
        pauses.release()
        engine.close()
        listening.close()
        if status is not None:
            status.close()


def make_engine(config: Config, engine_id: str) -> Engine:
    """The engine that the configuration names, still without weights. Raises ConfigError."""
    if config.engine.kind == "scripted":
        return ScriptedEngine(vocab_size=_vocab_size(config))
    if config.engine.kind == "sglang":
        from .sglang_connect import connect

        return connect(config, engine_id)
    # Engines of one run must not sample the same.
    seed = (config.run.seed * 1_000_003 + sum(engine_id.encode())) % 2**31
    if config.engine.kind == "vllm":
        from .vllm.connect import connect as connect_vllm

        return connect_vllm(config, seed)
    if config.policy.model is None:
        raise ConfigError(
            "policy.model is not set: the engine needs the model's directory for its architecture"
        )
    import torch

    from .transformers import TransformersEngine

    torch.set_num_threads(config.engine.threads)
    return TransformersEngine.from_directory(config.policy.model, config.engine, seed=seed)


class Following:
    """The subscriber's thread."""

    def __init__(self, subscriber: WeightSubscriber, connect: Any) -> None:
        """`connect`: makes the WeightsFeed, inside the thread."""
        self._subscriber, self._connect = subscriber, connect
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="weight-subscriber", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the thread has ended."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, after the update it may be in, and wait for it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=30)

    def _main(self) -> None:
        try:
            feed = self._connect()
            try:
                self._run(feed)
            finally:
                feed.close()
        except Exception as e:
            logger.exception("the weight subscriber ended")
            self.error = e

    def _run(self, feed: WeightsFeed) -> None:
        self._subscriber.announce()
        for records in feed.backlog():
            self._subscriber.see(records)
        self._subscriber.look_for_compacted()
        announced = looked = time.monotonic()
        patience, longest = LOOK_BACK_SECONDS
        while not self._stopping.is_set():
            while not self._stopping.is_set() and self._subscriber.follow():
                announced = time.monotonic()
                patience = LOOK_BACK_SECONDS[0]
            self._subscriber.see(feed.poll())
            if time.monotonic() - looked >= patience and (why := self._subscriber.look_back()):
                logger.warning("the weights topic is read again: %s", why)
                feed.rewind()
                looked, patience = time.monotonic(), min(2 * patience, longest)
            if time.monotonic() - announced >= ANNOUNCE_SECONDS:
                self._subscriber.announce()
                announced = time.monotonic()
        self._subscriber.stop()


async def _serve(
    server: HttpServer, listening: Any, engine: Engine, following: Following, pauses: Pauses
) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked.set)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    following.start()
    # Stop order: no new versions and the word that we stop, then the requests in flight, then the engine.
    counted = 0
    while not asked.is_set() and engine.alive and following.alive and not serving.done():
        try:
            async with asyncio.timeout(1.0):
                await asked.wait()
        except TimeoutError:
            tokens = engine.generated_tokens
            metrics.engine_running.set(engine.running)
            metrics.engine_tokens.inc(max(0, tokens - counted))
            counted = max(counted, tokens)
    await asyncio.to_thread(following.stop)
    await asyncio.to_thread(pauses.release)
    await asyncio.to_thread(engine.close)
    server.should_exit = True
    await serving
    if asked.is_set():
        return 0
    logger.error("the engine role ends: engine alive=%s subscriber=%r", engine.alive, following.error)
    return 1


def _facts(subscriber: WeightSubscriber) -> dict[str, Any]:
    s = subscriber.status()
    return {
        "engine_id": s.engine_id,
        "policy_id": s.policy_id,
        "state": s.state.value,
        "weights_hash": s.weights_hash,
        "latest_version": s.latest_version,
        "behind": s.behind,
        "updates": s.updates,
        "reason": s.reason,
    }


def _vocab_size(config: Config) -> int:
    """Of the model directory's config.json where there is one."""
    if config.policy.model is None or not (config.policy.model / "config.json").is_file():
        return 64
    return int(json.loads((config.policy.model / "config.json").read_text())["vocab_size"])
