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
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas import topics as t
from ...schemas.config import Config
from ...schemas.errors import ConfigError, FencedError, HeadraceError, TeamError
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.kafka import closing, make_consumer

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .step import Learner
    from .team import Team

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
    # Of the processes that torchrun starts, the first is the one to watch; the others do as it says.
    first = os.environ.get("RANK", "0") == "0"
    server, port = metrics.serve(config.metrics.host, config.metrics.port if first else 0)
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
    from .resume import config_hash
    from .step import make_learner
    from .team import open_team

    team = open_team()
    store = BlobStore(config.store_uri)
    learner = make_learner(model, config.trainer, team)
    folder = config.run.dir / "checkpoints" / config.policy.id
    checkpoints = Checkpoints(folder, keep=config.trainer.keep_checkpoints, team=team)
    if team.rank > 0:
        _follow(config, learner, checkpoints, store)
    else:
        with _dismissing(team):
            _lead(
                config, learner, checkpoints, store, config_hash(config.trainer, team.size), stopping, stack
            )
    team.close()


def _follow(config: Config, learner: Learner, checkpoints: Checkpoints, store: BlobStore) -> None:
    from .emit import Emitter
    from .follow import follow

    emitter = Emitter(
        store,
        config.policy.id,
        anchor_every=config.trainer.anchor_every,
        team=learner.team,
        threads=config.trainer.threads,
    )
    logger.info("rank %d of %d follows", learner.team.rank, learner.team.size)
    follow(learner, emitter, checkpoints, store)


@contextlib.contextmanager
def _dismissing(team: Team) -> Iterator[None]:
    """The other ranks are told to stop at an orderly end. After any other they lose the connection, and end by that:
    nobody knows what they wait for.
    """
    from .orders import Order, tell

    try:
        yield
    except TeamError:
        raise
    except HeadraceError:
        tell(team, Order.STOP)
        raise
    tell(team, Order.STOP)


def _lead(
    config: Config,
    learner: Learner,
    checkpoints: Checkpoints,
    store: BlobStore,
    settings: str,
    stopping: threading.Event,
    stack: contextlib.ExitStack,
) -> None:
    from .flops import peak_flops
    from .history import read_history
    from .loop import TrainerLoop
    from .payloads import Payloads
    from .presence import Presence, refuse_second
    from .publish import Publisher, make_transactional
    from .refs import RefReader
    from .resume import Redo, resume
    from .source import open_source
    from .step import DTYPES

    topics, policy_id = t.Topics(config.run.namespace), config.policy.id
    group = topics.group("trainer", policy_id)

    present = topics.group("trainer-presence", policy_id)
    restarted = bool(os.environ.get(metrics.RESTARTS_VARIABLE))
    if config.trainer.second == "refuse" and not restarted:
        refuse_second(config.kafka, present, policy_id)
    presence = Presence(config.kafka, present, topics.name(t.WEIGHTS, policy_id))
    presence.start()
    stack.callback(presence.close)
    producer = make_transactional(config.kafka, topics, policy_id)
    publisher = Publisher(
        producer,
        store,
        topics,
        policy_id,
        anchor_every=config.trainer.anchor_every,
        team=learner.team,
        threads=config.trainer.threads,
    )
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
        peak=learner.team.size * peak_flops(learner.live.device, DTYPES[config.trainer.dtype]),
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
