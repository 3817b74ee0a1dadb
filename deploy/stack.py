"""The whole loop on one machine: broker, topics, tasks, then every role as a process of its own.

start   broker, and whatever makes the model, at once -> topics, tasks, streams -> trainer, engines, rollout
stop    rollout -> engines -> streams -> trainer -> broker, each with a time limit
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..schemas.config import Config
from ..schemas.config_file import ENV_PREFIX, dump_config
from ..schemas.errors import ConfigError
from ..schemas.task import Task
from ..schemas.topics import SAMPLES, SCORES, TASKS, TRAJECTORIES, Topics
from ..streams.kafka import closing, create_topics, make_consumer, make_producer, partitions_of
from .broker.launcher import Broker, choose_kind, start_broker
from .broker.limits import LIMITS, BrokerLimits
from .restart_file import write_restarts
from .settings import RUN_FILE
from .supervisor import Role, RoleSpec, Supervisor
from .tasks import publish_tasks

PREPARE = "prepare"
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    config: Config
    tasks: Sequence[Task] = ()
    prepare: Sequence[str] | None = None
    """Command that writes policy.model, run while the broker starts."""
    plugin_path: Sequence[Path] = field(default=())
    """Where `module:attr` plug-ins are."""


class Stack:
    """The processes of one run. The owner calls `check()` in its loop, and `stop()` whatever happened."""

    def __init__(self, plan: Plan, *, tick: Callable[[str], None], hurry: Callable[[], bool]) -> None:
        """`tick` is told the phase, often; `hurry` true makes `stop` kill."""
        self._plan, self._tick, self._hurry = plan, tick, hurry
        self.run_dir = plan.config.run.dir.resolve()
        run = plan.config.run.model_copy(update={"dir": self.run_dir})
        self.config = plan.config.model_copy(update={"run": run})
        self.supervisor = Supervisor(on_restart=self._note_restarts)
        self.broker: Broker | None = None
        self._nodes = Supervisor(on_restart=self._note_restarts)
        """The broker's processes: they outlive the roles, so that the end of the log can still be read."""
        self._restarts: dict[str, Mapping[str, int]] = {}

    def start(self) -> None:
        """Start everything; returns when all roles have been started, which is before they are ready."""
        limits = self._limits()
        write_restarts(self.run_dir, {})
        if self._plan.prepare is not None:
            self._start(PREPARE, list(self._plan.prepare), finishes=True)
        self._connect()
        topics = Topics(self.config.run.namespace)
        self._tick("topics and tasks")
        settings = _retention(self.config) if limits is not None and limits.max_data_bytes else None
        create_topics(self.config.kafka, topics, [self.config.policy.id], settings=settings)
        self._publish(topics.name(TASKS))
        dump_config(self.config, self.run_dir / RUN_FILE)
        for n in range(self.config.streams.workers):
            self._role("streams", f"streams-{n}", [], stop_order=2, grace_s=20.0)
        while self._plan.prepare is not None and not self.supervisor.finished(PREPARE):
            self.check()
            self._tick("preparing the model")
            time.sleep(0.02)
        self._role("train", "trainer", [], stop_order=3, grace_s=30.0, finishes=self.config.trainer.steps > 0)
        for n in range(self.config.engine.count):
            port = self.config.engine.port + n if self.config.engine.port else 0
            args = ["--id", f"engine-{n}", "--set", f"engine.port={port}"]
            self._role("engine", f"engine-{n}", args, stop_order=1)
        if self.config.gateway.enabled:
            self._role("gateway", "gateway-0", ["--id", "gateway-0"], stop_order=0, grace_s=30.0)
        for n in range(self.config.rollout.workers):
            self._role("rollout", f"rollout-{n}", ["--id", f"rollout-{n}"], stop_order=0, grace_s=30.0)

    def check(self) -> None:
        """Restart what died. Raises RoleFailedError when a role, or a node of the broker, was given up."""
        self._nodes.check()
        self.supervisor.check()

    @property
    def roles(self) -> list[Role]:
        """All processes, those of the broker first."""
        return [*self._nodes.roles, *self.supervisor.roles]

    def _note_restarts(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        self._restarts.update(counts)
        write_restarts(self.run_dir, self._restarts)

    @property
    def trained(self) -> bool:
        """True once the trainer has done all its steps."""
        roles = {role.spec.name for role in self.supervisor.roles}
        return "trainer" in roles and self.supervisor.finished("trainer")

    def finish_with(self, name: str, settings: Mapping[str, object]) -> None:
        """Start a trainer of another name, with `settings` over the run's, that ends by itself."""
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        self._role("train", name, sets, stop_order=3, grace_s=30.0, finishes=True)

    def stop_roles(self) -> None:
        """Stop all but the broker, so that the end of the log can still be read. Idempotent."""
        self.supervisor.stop(hurry=self._hurry)

    def stop(self) -> None:
        """Stop everything. Idempotent."""
        self.stop_roles()
        self._nodes.stop(hurry=self._hurry)
        if self.broker is not None:
            self.broker.tidy()

    def _limits(self) -> BrokerLimits | None:
        """Of the broker that will be started; None for one that runs already."""
        if self.config.kafka.bootstrap is not None:
            return None
        kind, _ = choose_kind(self.config.kafka)
        limits = LIMITS[kind]
        if limits.max_workers is not None and self.config.streams.workers > limits.max_workers:
            raise ConfigError(
                f"streams.workers = {self.config.streams.workers}: {limits.title} takes at most "
                f"{limits.max_workers}; use Apache Kafka (KAFKA_HOME or --bootstrap) for more"
            )
        return limits

    def _connect(self) -> None:
        """Start a broker unless there is one."""
        if self.config.kafka.bootstrap is not None:
            return
        kind, home = choose_kind(self.config.kafka)
        many = f"Apache Kafka ({self.config.kafka.nodes} nodes)"
        several = kind == "kafka" and self.config.kafka.nodes > 1
        self._tick(f"starting {many if several else LIMITS[kind].title}")
        data, log = self.run_dir / "broker" / kind, self.run_dir / "logs" / "broker.log"
        nodes = self.config.kafka.nodes if kind == "kafka" else 1
        broker = self.broker = start_broker(kind, data, home, log=log, nodes=nodes)
        for node in broker.nodes:
            self._nodes.adopt(
                RoleSpec(
                    name=node.name,
                    argv=node.command,
                    log=node.log,
                    grace_s=broker.grace_s,
                    death_signal=signal.SIGTERM,
                ),
                node.process,
            )
        mine = broker.config
        update = {
            "bootstrap": mine.bootstrap,
            "static_members": mine.static_members,
            "replication_factor": mine.replication_factor,
        }
        kafka = self.config.kafka.model_copy(update=update)
        self.config = self.config.model_copy(update={"kafka": kafka})

    def _publish(self, topic: str) -> None:
        if not self._plan.tasks:
            return
        with closing(make_consumer(self.config.kafka, client_id="headrace-tasks")) as consumer:
            partitions = partitions_of(consumer, topic)
            ends = consumer.end_offsets(partitions)
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            present: dict[bytes, bytes] = {}
            while any(consumer.position(p) < ends[p] for p in partitions):
                for records in consumer.poll(200).values():
                    present.update({r.key: r.value for r in records})
        with closing(make_producer(self.config.kafka, client_id="headrace-tasks")) as producer:
            publish_tasks(producer, topic, self._plan.tasks, present=present)

    def _role(
        self,
        command: str,
        name: str,
        args: Sequence[str],
        *,
        stop_order: int,
        grace_s: float = 10.0,
        finishes: bool = False,
    ) -> None:
        port = self.config.metrics.port
        if port:
            args = [*args, "--set", f"metrics.port={port + len(self.supervisor.roles)}"]
        argv = [*python("headrace.deploy.cli"), command, "-c", str(self.run_dir / RUN_FILE), *args]
        self._start(name, argv, stop_order=stop_order, grace_s=grace_s, finishes=finishes)

    def _start(
        self, name: str, argv: Sequence[str], *, stop_order: int = 0, grace_s: float = 10.0, finishes: bool
    ) -> None:
        self._tick(f"starting {name}")
        self.supervisor.start(
            RoleSpec(
                name=name,
                argv=argv,
                log=self.run_dir / "logs" / f"{name}.log",
                env=role_environment(self._plan.plugin_path),
                stop_order=stop_order,
                grace_s=grace_s,
                finishes=finishes,
            )
        )


def python(module: str) -> list[str]:
    """Command that runs a module without the working directory in front of what is installed."""
    return [sys.executable, "-P", "-m", module]


def role_environment(plugin_path: Sequence[Path]) -> dict[str, str]:
    """This process's environment for a role: the configuration file has it all, so overrides stay here."""
    env = {k: v for k, v in os.environ.items() if not (k.startswith(ENV_PREFIX) and "__" in k)}
    env |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in ("HF_HUB_OFFLINE", "OMP_NUM_THREADS"):
        env.setdefault(name, "1")
    env["HEADRACE_PLUGIN_PATH"] = os.pathsep.join(str(p) for p in plugin_path)
    return env


def _retention(config: Config) -> dict[str, dict[str, str]]:
    """Retention per partition for a broker that must stay small: what the trainer may still ask for, and no more.

    That is the samples ahead of it and those since its last checkpoint, at sizes two to three times the usual ones.
    """
    samples = config.trainer.batch_size * (config.staleness.max_lag + 2 + config.trainer.checkpoint_every)
    payload = 2048 + 12 * min(config.rollout.max_total_tokens, config.store.inline_max_bytes // 12)
    settings = {}
    for spec, size in ((SCORES, 2048), (SAMPLES, 2048), (TRAJECTORIES, payload)):
        kept = min(24 * MIB, max(MIB, samples * size // spec.partitions))
        # Whole segments are removed, never the one that is written.
        settings[spec.topic] = {"retention.bytes": str(kept), "segment.bytes": str(kept // 4)}
    return settings
