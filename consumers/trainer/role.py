"""The trainer as a process: open everything in the order that makes a takeover safe, resume, train, close.

Order: with `trainer.second = "refuse"` a look at who is at work; the transactional producer (it fences an earlier
trainer, whose open transaction is aborted); the log; checkpoints and redone steps; the samples.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

from ...schemas import topics as t
from ...schemas.config import Config
from ...schemas.errors import ConfigError, FencedError
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.kafka import closing, make_consumer

logger = logging.getLogger(__name__)

FENCED_STATUS = 3
"""Exit status when another trainer has taken over, or is at work already: starting again would only fence that one."""


def main(config: Config) -> int:
    """Train until the configured step, SIGTERM or SIGINT; returns the exit status. Raises HeadraceError."""
    model = _model_directory(config)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    stopping = threading.Event()
    _stop_on_signals(stopping)
    server, port = metrics.serve(config.metrics.host, config.metrics.port)
    logger.info("trainer starts policy=%s metrics_port=%d", config.policy.id, port)
    metrics.role_up.labels(role="trainer").set(1)
    try:
        with contextlib.ExitStack() as stack:
            _train(config, model, stopping, stack)
    except FencedError as e:
        logger.error("%s", e)
        return FENCED_STATUS
    finally:
        metrics.role_up.labels(role="trainer").set(0)
        server.shutdown()
    return 0


def _train(config: Config, model: Path, stopping: threading.Event, stack: contextlib.ExitStack) -> None:
    from .checkpoint import Checkpoints
    from .flops import peak_flops
    from .history import read_history
    from .loop import TrainerLoop
    from .payloads import Payloads
    from .presence import Presence, refuse_second
    from .publish import Publisher, make_transactional
    from .refs import RefReader
    from .resume import Redo, config_hash, resume
    from .source import open_source
    from .step import DTYPES, make_learner

    topics, policy_id = t.Topics(config.run.namespace), config.policy.id
    group = topics.group("trainer", policy_id)
    store = BlobStore(config.store_uri)
    learner = make_learner(model, config.trainer)
    settings = config_hash(config.trainer)
    checkpoints = Checkpoints(
        config.run.dir / "checkpoints" / policy_id, keep=config.trainer.keep_checkpoints
    )

    present = topics.group("trainer-presence", policy_id)
    restarted = bool(os.environ.get(metrics.RESTARTS_VARIABLE))
    if config.trainer.second == "refuse" and not restarted:
        refuse_second(config.kafka, present, policy_id)
    presence = Presence(config.kafka, present, topics.name(t.WEIGHTS, policy_id))
    presence.start()
    stack.callback(presence.close)
    producer = make_transactional(config.kafka, topics, policy_id)
    publisher = Publisher(producer, store, topics, policy_id, anchor_every=config.trainer.anchor_every)
    stack.callback(publisher.close)
    with closing(make_consumer(config.kafka, client_id=f"{group}-log")) as consumer:
        history = read_history(consumer, topics.name(t.WEIGHTS, policy_id))

    def reader(spec: t.TopicSpec, policy: str | None = None) -> Any:
        made = RefReader(config.kafka, topics.name(spec, policy), client_id=f"{group}-{spec.topic}")
        stack.callback(made.close)
        return made

    payloads = Payloads(reader(t.TRAJECTORIES), store)
    newest = history.newest
    loop = TrainerLoop(
        config.trainer,
        learner,
        publisher,
        checkpoints,
        settings=settings,
        peak=peak_flops(learner.live.device, DTYPES[config.trainer.dtype]),
        consumed=newest.consumed if newest is not None else (),
    )
    if newest is None:
        checkpoints.set_aside(checkpoints.infos())
        loop.announce()
    else:
        samples = reader(t.SAMPLES, policy_id)
        resumed = resume(learner, history, checkpoints, Redo(samples, payloads, store), store, settings)
        samples.close()
        publisher.stand_at(newest.version, learner.master)
        if resumed.reanchor:
            loop.announce(anchor=True)
    loop.save(force=True)
    metrics.policy_version.set(learner.version)
    source = open_source(
        make_consumer(config.kafka, client_id=group, group_id=group, max_poll_records=2000),
        topics.name(t.SAMPLES, policy_id),
        batch_size=config.trainer.batch_size,
        max_lag=config.staleness.max_lag,
        finished=dict(newest.consumed) if newest is not None else {},
    )
    stack.callback(source.close)
    logger.info("trainer ready version=%d hash=%016x", learner.version, publisher.weights_hash)
    loop.run(source, payloads, stopping)
    logger.info("trainer ends version=%d", learner.version)


def _model_directory(config: Config) -> Path:
    if config.policy.model is None:
        raise ConfigError("policy.model is not set: give a Hugging Face model directory")
    return config.policy.model


def _stop_on_signals(stopping: threading.Event) -> None:
    def handle(signum: int, frame: object) -> None:
        stopping.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handle)
