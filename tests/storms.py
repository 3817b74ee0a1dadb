"""A storm: workers as processes, a random one killed, terminated or frozen every few seconds, under steady load.

`Storm` keeps a set of workers alive as a supervisor would and counts why they ended. What has come out is
checked by the tests against the log alone.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from streams_workers import StreamsProcess

from headrace.schemas.config import Config, KafkaConfig
from headrace.streams.kafka import closing, make_consumer, partitions_of

FROZEN_SECONDS = 12.0
"""Twice the session of a worker: the group takes its partitions away meanwhile."""
FIRST_SECONDS = (1.0, 4.0)
"""The first event comes before anything is committed."""
STALLED = 70


@dataclass(slots=True)
class _Worker:
    process: StreamsProcess
    frozen_until: float | None = None


@dataclass(slots=True)
class Storm:
    """`count` workers running `code`; call `weather` often."""

    config: Config
    folder: Path
    code: str
    rng: random.Random
    count: int = 3
    kinds: tuple[str, ...] = ("kill", "terminate", "freeze")
    events: Counter[str] = field(default_factory=Counter)
    """What was done, and `stalled` or `crashed` for workers that ended by themselves."""
    _workers: list[_Worker] = field(default_factory=list)
    _next: float = 0.0

    def start(self) -> None:
        """Start the workers."""
        self._workers = [_Worker(self._new(i)) for i in range(self.count)]
        self._next = time.monotonic() + self.rng.uniform(*FIRST_SECONDS)

    def weather(self, *, calm: bool = False) -> None:
        """What is due: an event, unless `calm`; thaws and replacements in any case."""
        now = time.monotonic()
        for i, worker in enumerate(self._workers):
            if worker.frozen_until is not None and (now >= worker.frozen_until or calm):
                worker.process.process.send_signal(signal.SIGCONT)
                worker.frozen_until = None
            status = worker.process.process.poll()
            if status is not None:
                self.events["stalled" if status == STALLED else f"crashed ({status})"] += 1
                worker.process = self._new(i)
        if not calm and now >= self._next:
            self._next = now + self.rng.uniform(1.0, 9.0)
            self._strike(now)

    def _strike(self, now: float) -> None:
        awake = [i for i, w in enumerate(self._workers) if w.frozen_until is None]
        kind = self.rng.choice(self.kinds)
        if not awake:
            return
        i = self.rng.choice(awake)
        worker = self._workers[i]
        self.events[kind] += 1
        if kind == "freeze":
            worker.process.process.send_signal(signal.SIGSTOP)
            worker.frozen_until = now + FROZEN_SECONDS
            return
        if kind == "terminate":
            worker.process.process.send_signal(signal.SIGTERM)
            self._wait_briefly(worker)
        worker.process.kill()
        worker.process = self._new(i)

    @staticmethod
    def _wait_briefly(worker: _Worker) -> None:
        """As a supervisor does before it kills; a worker in trouble may take its time."""
        deadline = time.monotonic() + 3.0
        while worker.process.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill all of them."""
        for worker in self._workers:
            worker.process.process.send_signal(signal.SIGCONT)
            worker.process.kill()

    def logs(self) -> str:
        """The end of what each has written."""
        return "\n".join(w.process.log.read_text()[-4000:] for w in self._workers)

    def _new(self, i: int) -> StreamsProcess:
        return StreamsProcess(self.config, self.folder / f"w{i}", code=self.code, name="streams")

    @property
    def struck(self) -> int:
        """Kills, terminations and freezes so far."""
        return sum(self.events[k] for k in ("kill", "terminate", "freeze"))


def rage(storm: Storm, send: Callable[[int], None], *, per_second: int, seconds: float) -> None:
    """The storm with `send(n)` called for `per_second` records a second; a slow machine sends fewer at once."""
    started = time.monotonic()
    sent = 0
    while (elapsed := time.monotonic() - started) < seconds:
        due = int(elapsed * per_second) - sent
        if due > 0:
            send(due)
            sent += due
        storm.weather()
        time.sleep(0.05)


def lags(config: KafkaConfig, group: str, topics: list[str]) -> dict[str, int]:
    """Records between the committed offset and the end, by topic and partition; empty where there are none."""
    found = {}
    with closing(make_consumer(config, client_id="test", group_id=group)) as consumer:
        for topic in topics:
            tps = partitions_of(consumer, topic)
            for tp, end in consumer.end_offsets(tps).items():
                lag = end - (consumer.committed(tp) or 0)
                if lag:
                    found[f"{tp.topic}-{tp.partition}"] = lag
    return found


def calm_until(storm: Storm | None, done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Keep the workers alive until `done()`; False when it does not come in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if storm is not None:
            storm.weather(calm=True)
        if done():
            return True
        time.sleep(0.5)
    return False
