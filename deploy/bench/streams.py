"""Throughput of verify -> advantage -> gate, in samples per second and worker, beside a bare pass-through.

Both read the same backlog from the same broker in processes of their own, one after the other, and are timed by
the broker's log: from the moment a tenth of the output is in to the moment all of it is.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from kafka import TopicPartition
from kafka.admin import NewTopic

from ...schemas.config import Config, KafkaConfig
from ...schemas.config_file import dump_config
from ...schemas.errors import BrokerError
from ...schemas.topics import SAMPLES, SCORES, TRAJECTORIES, Topics
from ...streams.kafka import closing, create_topics, make_admin, make_consumer, make_producer
from ..processes import spawn, stop, tail
from . import parts, thin

POLICY = "bench"
MIB = 1024 * 1024
WARM_SHARE = 0.1
"""Of the output, before the clock starts: what joining the group and the first fetches cost is not throughput."""
STALL_SECONDS = 60.0
STOP_SECONDS = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is put through."""

    records: int = 24_000
    partitions: int = 6
    group_size: int = 8
    tokens: int = 16
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Bench:
    """One broker, one folder for configurations and logs."""

    kafka: KafkaConfig
    folder: Path
    load: Load
    say: Say

    def run(self, *, workers: int) -> dict[str, Any]:
        """The figures; `three_workers_per_s` is None where the broker takes one worker only."""
        alone, bare = [], []
        for n in range(self.load.rounds):
            bare.append(self._timed(f"pass-through {n + 1}", self._pass_through))
            alone.append(self._timed(f"one worker {n + 1}", lambda ns: self._workers(ns, 1)))
        several = (
            self._timed(f"{workers} workers", lambda ns: self._workers(ns, workers)) if workers > 1 else None
        )
        samples, passed = statistics.median(alone), statistics.median(bare)
        return {
            "samples_per_s": round(samples, 1),
            "passthrough_per_s": round(passed, 1),
            "ratio": round(samples / passed, 3),
            "three_workers_per_s": round(several, 1) if several is not None and workers == 3 else None,
            "workers": workers,
            "workers_per_s": round(several if several is not None else samples, 1),
            "rounds": {"samples_per_s": _rounded(alone), "passthrough_per_s": _rounded(bare)},
            "records": self.load.records,
            "partitions": self.load.partitions,
            "record_bytes": len(next(iter(self._records(1)))[1]),
            "tokens": self.load.tokens,
            **parts.bound(parts.work_us(tokens=self.load.tokens), passed),
        }

    def memory(self, *, total: int, every: int) -> dict[str, Any]:
        """Resident set of one worker in MiB after each `every` of `total` scores, and its slope after the first half."""
        found: list[tuple[int, float]] = []
        with self._namespace() as namespace:
            target, command = Topics(namespace).name(SAMPLES, POLICY), self._streams_command(namespace)
            with self._process(namespace, "streams-0", command) as (process, log):
                child = psutil.Process(process.pid)
                for done in range(every, total + 1, every):
                    self._send(Topics(namespace), every, start=done - every)
                    self._rate(target, [process], [log], wanted=done, warm=0.0)
                    found.append((done, round(child.memory_info().rss / MIB, 1)))
                    self.say(f"{done:>9,} scores  resident {found[-1][1]:7.1f} MiB")
        late = found[len(found) // 2 :]
        growth = statistics.linear_regression(*zip(*late, strict=True)).slope if len(late) > 1 else 0.0
        return {
            "scores": total,
            "resident_mib": [mib for _, mib in found],
            "every": every,
            "growth_mib_per_100k": round(growth * 100_000, 3),
        }

    def _timed(self, what: str, run: Callable[[str], float]) -> float:
        self.say(f"{what}: filling")
        with self._namespace() as namespace:
            self._send(Topics(namespace), self.load.records)
            self.say(f"{what}: running")
            rate = run(namespace)
        self.say(f"{what}: {rate:,.0f} records/s")
        return rate

    @contextlib.contextmanager
    def _namespace(self) -> Iterator[str]:
        """Topics of their own, deleted afterwards."""
        namespace = f"bench{uuid.uuid4().hex[:8]}"
        self._create(namespace)
        try:
            yield namespace
        finally:
            self._forget(namespace)

    def _records(self, count: int, *, start: int = 0) -> Iterator[tuple[bytes, bytes, Any]]:
        load = self.load
        return thin.records(start, count, group_size=load.group_size, tokens=load.tokens, policy_id=POLICY)

    def _send(self, topics: Topics, count: int, *, start: int = 0) -> None:
        name = topics.name(TRAJECTORIES)
        with closing(make_producer(self.kafka, client_id="headrace-bench", linger_ms=20)) as producer:
            for key, value, headers in self._records(count, start=start):
                producer.send(name, value, key=key, headers=headers)
            producer.flush(timeout=120)

    def _create(self, namespace: str) -> None:
        topics = Topics(namespace)
        with closing(make_admin(self.kafka)) as admin:
            admin.create_topics(
                [
                    NewTopic(name, self.load.partitions, self.kafka.replication_factor, topic_configs=configs)
                    for name, configs in (
                        (topics.name(TRAJECTORIES), TRAJECTORIES.configs),
                        (topics.name(SCORES), SCORES.configs),
                        (topics.name(SAMPLES, POLICY), SAMPLES.configs),
                    )
                ]
            )
        create_topics(self.kafka, topics, [POLICY])

    def _forget(self, namespace: str) -> None:
        with closing(make_admin(self.kafka)) as admin:
            admin.delete_topics([n for n in admin.list_topics() if n.startswith(f"{namespace}.")])

    def _pass_through(self, namespace: str) -> float:
        topics = Topics(namespace)
        target = topics.name(SAMPLES, POLICY)
        assert self.kafka.bootstrap is not None
        command = [sys.executable, "-m", "headrace.deploy.bench.passthrough", self.kafka.bootstrap]
        command += [topics.name(TRAJECTORIES), target, str(self.load.records)]
        with self._process(namespace, "passthrough", command) as (process, log):
            return self._rate(target, [process], [log])

    def _streams_command(self, namespace: str) -> list[str]:
        config = Config.model_validate(
            {
                "run": {"namespace": namespace, "dir": str(self.folder / namespace)},
                "kafka": self.kafka.model_dump(),
                "policy": {"id": POLICY},
                "verify": {"reward": "calculator"},
            }
        )
        path = self.folder / f"{namespace}.json"
        dump_config(config, path)
        return [sys.executable, "-m", "headrace.deploy.cli", "streams", "-c", str(path)]

    def _workers(self, namespace: str, count: int) -> float:
        topics, command = Topics(namespace), self._streams_command(namespace)
        with contextlib.ExitStack() as stack:
            started = [
                stack.enter_context(self._process(namespace, f"streams-{n}", command)) for n in range(count)
            ]
            return self._rate(
                topics.name(SAMPLES, POLICY), [process for process, _ in started], [log for _, log in started]
            )

    @contextlib.contextmanager
    def _process(self, namespace: str, name: str, command: list[str]) -> Iterator[tuple[Any, Path]]:
        log = self.folder / f"{namespace}-{name}.log"
        process = spawn(command, log=log)
        try:
            yield process, log
        finally:
            stop(process, grace_s=STOP_SECONDS)

    def _rate(
        self,
        target: str,
        processes: list[Any],
        logs: list[Path],
        *,
        wanted: int | None = None,
        warm: float = WARM_SHARE,
    ) -> float:
        """Waits for `wanted` records in `target`; records per second after the warm share.

        Raises BrokerError when they stop coming.
        """
        wanted = self.load.records if wanted is None else wanted
        first: tuple[int, float] | None = None
        seen, moved = 0, time.monotonic()
        with closing(make_consumer(self.kafka, client_id="headrace-bench")) as consumer:
            tps = [TopicPartition(target, p) for p in range(self.load.partitions)]
            while True:
                count, now = sum(consumer.end_offsets(tps).values()), time.monotonic()
                # A small load can be through at the first look: then all of it counts from the start.
                if first is None and count >= warm * wanted:
                    first = (count, now) if count < wanted else (seen, moved)
                if count >= wanted and first is not None:
                    return (count - first[0]) / max(now - first[1], 1e-9)
                if count > seen:
                    seen, moved = count, now
                failed = [log for p, log in zip(processes, logs, strict=True) if p.poll() not in (None, 0)]
                if failed or now - moved > STALL_SECONDS:
                    log = (failed or logs)[0]
                    raise BrokerError(
                        f"{count} of {wanted} records came through. {log} ends with\n{tail(log)}"
                    )
                time.sleep(0.05)


def _rounded(values: list[float]) -> list[float]:
    return [round(v, 1) for v in values]
