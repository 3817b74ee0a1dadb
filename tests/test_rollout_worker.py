"""The rollout worker on a broker: every trajectory is whole, nothing is admitted beyond the bound, none is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_parts import ScriptedClient, write_policy

from headrace.producers.engines.scripted import ScriptedEngine
from headrace.producers.engines.server import EngineServer, HttpServer, bind, url_of
from headrace.producers.rollout.engine_pool import RetryRule
from headrace.producers.rollout.groups import GroupMaker
from headrace.producers.rollout.tokenizing import load_tokenizer
from headrace.producers.rollout.worker import RolloutWorker
from headrace.schemas import topics as t
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.deadletter import read_dead_letter
from headrace.schemas.engine import ENGINE, EngineState, EngineStatus
from headrace.schemas.errors import ConfigError
from headrace.schemas.sample import SAMPLE, Fate, Sample, sample_headers
from headrace.schemas.score import Ref
from headrace.schemas.task import TASK, Task
from headrace.schemas.trajectory import TRAJECTORY, Trajectory, TrajectoryStatus
from headrace.schemas.weights import WEIGHTS, BlobKind, WeightBlob, WeightRecord
from headrace.streams.blobs import BlobStore
from headrace.streams.claims import check_out
from headrace.streams.kafka import create_topics, make_consumer, make_producer, partitions_of, poll_records

BATCH, MAX_LAG, GROUP = 16, 2, 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@dataclass
class Pipe:
    """What stands behind the worker: fates for its trajectories, and a trainer that steps when it has a batch."""

    config: Config
    steps: int
    """Steps the trainer makes; it then stops consuming."""
    trajectories: list[Trajectory] = field(default_factory=list)
    most_ahead: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        topics, policy = t.Topics(self.config.run.namespace), self.config.policy.id
        producer = make_producer(self.config.kafka, client_id="pipe", linger_ms=0)
        consumer = make_consumer(self.config.kafka, client_id="pipe")
        consumer.assign(partitions_of(consumer, topics.name(t.TRAJECTORIES)))
        consumer.seek_to_beginning()
        version, waiting = 0, []
        while not self.stopping.is_set():
            for record in poll_records(consumer):
                trajectory = TRAJECTORY.decode(record.value, record.headers)
                self.trajectories.append(trajectory)
                self.most_ahead = max(self.most_ahead, len(self.trajectories) - version * BATCH)
                sample = _sample(trajectory, Ref(record.partition, record.offset))
                meta = producer.send(
                    topics.name(t.SAMPLES, policy),
                    value=SAMPLE.encode(sample),
                    key=trajectory.group_id.encode(),
                    headers=sample_headers(sample),
                ).get(10)
                waiting.append((meta.partition, meta.offset))
            while len(waiting) >= BATCH and version < self.steps:
                batch, waiting = waiting[:BATCH], waiting[BATCH:]
                version += 1
                weights = _weights(policy, version, batch)
                producer.send(topics.name(t.WEIGHTS, policy), value=WEIGHTS.encode(weights)).get(10)
            if version == self.steps:
                self.done.set()
        consumer.close()
        producer.close()


def _sample(trajectory: Trajectory, ref: Ref) -> Sample:
    completed = trajectory.status is TrajectoryStatus.COMPLETED
    return Sample(
        **{
            name: getattr(trajectory, name) for name in ("trajectory_id", "rollout_id", "group_id", "task_id")
        },
        policy_id=trajectory.policy_id,
        split=trajectory.split,
        fate=Fate.ADMITTED if completed else Fate.DROPPED,
        reason=None if completed else "void",
        advantage=0.0,
        version_min=trajectory.version_min,
        version_max=trajectory.version_max,
        total_tokens=len(trajectory.token_ids),
        sampled_tokens=trajectory.sampled_tokens,
        truncated=trajectory.truncated,
        ref=ref,
    )


def _weights(policy_id: str, version: int, batch: list[tuple[int, int]]) -> WeightRecord:
    blob = WeightBlob(kind=BlobKind.ANCHOR, uri=f"w/{version}", size=1, sha256="0" * 64)
    consumed = {p: max(o for q, o in batch if q == p) + 1 for p, _ in batch}
    return WeightRecord(
        policy_id=policy_id,
        version=version,
        base_version=None,
        base_hash=None,
        weights_hash=0,
        blobs=(blob,),
        consumed=tuple(sorted(consumed.items())),
    )


def status(engine_id: str, *, state: EngineState = EngineState.IDLE, at_ms: int = 0) -> EngineStatus:
    return EngineStatus(
        engine_id=engine_id,
        policy_id="policy",
        state=state,
        version=0,
        url=f"http://127.0.0.1/{engine_id}",
        at_ms=at_ms,
    )


def configured(broker: Any, namespace: str, policy: Path, tmp_path: Path, **rollout: Any) -> Config:
    config = Config.model_validate(
        {
            "run": {"namespace": namespace, "dir": str(tmp_path)},
            "kafka": broker.config.model_dump(),
            "policy": {"model": str(policy)},
            "trainer": {"batch_size": BATCH},
            "staleness": {"max_lag": MAX_LAG},
            "rollout": {
                "environment": "calculator",
                "group_size": GROUP,
                "max_tokens": 16,
                "stop": ["]"],
                "concurrency": 64,
                **rollout,
            },
        }
    )
    create_topics(config.kafka, t.Topics(namespace), ["policy"])
    return config


def publish(config: Config, *, tasks: list[Task], engines: list[EngineStatus]) -> None:
    topics = t.Topics(config.run.namespace)
    producer = make_producer(config.kafka, client_id="test")
    for task in tasks:
        producer.send(topics.name(t.TASKS), key=task.task_id.encode(), value=TASK.encode(task))
    for engine in engines:
        producer.send(topics.name(t.ENGINES), key=engine.engine_id.encode(), value=ENGINE.encode(engine))
    producer.flush()
    producer.close()


def sums(n: int) -> list[Task]:
    return [Task(task_id=f"t{i}", policy_id="policy", prompt=f"{10 + i}+{20 + i}=") for i in range(n)]


@contextmanager
def pipe_behind(config: Config, steps: int) -> Iterator[Pipe]:
    pipe = Pipe(config, steps)
    thread = threading.Thread(target=pipe.run)
    thread.start()
    try:
        yield pipe
    finally:
        pipe.stopping.set()
        thread.join()


def run_worker(
    config: Config,
    clients: dict[str, ScriptedClient],
    until: Callable[[RolloutWorker], bool],
    *,
    seconds: float = 60.0,
) -> tuple[RolloutWorker, int]:
    """A worker that runs until `until(worker)`; it and its exit status."""

    async def serve() -> tuple[RolloutWorker, int]:
        assert config.policy.model is not None
        worker = RolloutWorker(
            config,
            "rollout-0",
            maker=GroupMaker(config.rollout, load_tokenizer(config.policy.model)),
            connect=lambda url: clients[url.rpartition("/")[2]],
            retry=RetryRule(attempts=4, first_pause=0.01, longest_pause=0.05),
        )
        running = asyncio.create_task(worker.run())
        deadline = time.monotonic() + seconds
        while not until(worker) and not running.done() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        ended = until(worker)
        worker.stop()
        code = await running
        assert ended, "the worker did not get there in time"
        return worker, code

    return asyncio.run(serve())


def test_trajectories_are_whole_and_never_more_than_the_bound_are_ahead(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    publish(config, tasks=sums(5), engines=[status("a"), status("b")])
    clients = {"a": ScriptedClient(), "b": ScriptedClient()}
    with pipe_behind(config, steps=6) as pipe:
        worker, code = run_worker(
            config, clients, lambda w: pipe.done.is_set() and w.ledger.ahead == (MAX_LAG + 1) * BATCH
        )
    assert code == 0
    assert worker.ledger.version == 6
    assert len(pipe.trajectories) == (6 + MAX_LAG + 1) * BATCH
    assert pipe.most_ahead <= (MAX_LAG + 1) * BATCH
    assert {u.status for u in pipe.trajectories} == {TrajectoryStatus.COMPLETED}
    assert len({u.rollout_id for u in pipe.trajectories}) == len(pipe.trajectories)
    assert {u.engine_id for u in pipe.trajectories} == {"a", "b"}
    sizes: dict[str, int] = {}
    for u in pipe.trajectories:
        sizes[u.group_id] = sizes.get(u.group_id, 0) + 1
        assert u.sampled_tokens == len(u.token_ids) - 6 - 3
    assert set(sizes.values()) == {GROUP}


def test_an_engine_that_dies_leaves_a_marker_for_each_rollout_it_had(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    publish(config, tasks=sums(5), engines=[status("a")])
    client = ScriptedClient()
    client.breaks_after = 61
    with pipe_behind(config, steps=1) as pipe:
        worker, code = run_worker(config, {"a": client}, lambda w: _aborted(pipe) > 0)
        wait_until(lambda: len(pipe.trajectories) == worker.groups_opened * GROUP)
    assert code == 0
    aborted = [u for u in pipe.trajectories if u.status is TrajectoryStatus.ABORTED]
    assert {u.reason for u in aborted} == {"engine"}
    assert sum(u.status is TrajectoryStatus.COMPLETED for u in pipe.trajectories) >= 20
    assert worker.ledger.running == 0


def test_turns_of_a_dead_engine_move_to_another(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    publish(config, tasks=sums(5), engines=[status("a"), status("b")])
    clients = {"a": ScriptedClient(), "b": ScriptedClient()}
    clients["a"].breaks_after = 21
    with pipe_behind(config, steps=3) as pipe:
        _, code = run_worker(config, clients, lambda w: pipe.done.is_set())
    assert code == 0
    assert _aborted(pipe) == 0


@contextmanager
def served(engine: ScriptedEngine) -> Iterator[str]:
    """The engine's HTTP interface in a thread; its url."""
    listening = bind("127.0.0.1", 0)
    server = HttpServer(EngineServer(engine).app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield url_of(listening)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def worker_process(config: Config, tmp_path: Path) -> subprocess.Popen[bytes]:
    dump_config(config, tmp_path / "config.json")
    code = (
        "import sys, logging; from pathlib import Path; logging.basicConfig(level=logging.INFO)\n"
        "from headrace.schemas.config_file import load_config\n"
        "from headrace.producers.rollout.worker import main\n"
        "sys.exit(main(load_config(Path(sys.argv[1]))))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "config.json")])


def test_a_worker_process_samples_over_http_and_ends_whole_groups_on_sigterm(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    """Every group that was begun has a record of each of its rollouts, those cut short by the signal included."""
    config = configured(broker, namespace, policy, tmp_path, max_tokens=12)
    slow = threading.Event()

    async def gate() -> None:
        await asyncio.sleep(3600 if slow.is_set() else 0)

    engine = ScriptedEngine({"w": np.zeros(2, np.uint16)}, version=0, vocab_size=17, gate=gate)
    with served(engine) as url, pipe_behind(config, steps=2) as pipe:
        publish(config, tasks=sums(5), engines=[dataclasses.replace(status("a"), url=url)])
        process = worker_process(config, tmp_path)
        try:
            assert pipe.done.wait(60)
            slow.set()
            wait_until(lambda: engine.running > 0 or process.poll() is not None)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
        sizes = Counter[str]()
        wait_until(lambda: set(_sizes(pipe, sizes).values()) == {GROUP})
    reasons = {u.reason for u in pipe.trajectories if u.status is TrajectoryStatus.ABORTED}
    assert reasons <= {"shutdown"}


def _sizes(pipe: Pipe, sizes: Counter[str]) -> Counter[str]:
    sizes.clear()
    sizes.update(u.group_id for u in list(pipe.trajectories))
    return sizes


def test_a_task_that_cannot_be_read_is_a_dead_letter_and_the_others_are_rolled_out(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    topics = t.Topics(namespace)
    producer = make_producer(config.kafka, client_id="test")
    producer.send(topics.name(t.TASKS), key=b"bad", value=b"not arrow", headers=[("own", b"1")])
    producer.flush()
    producer.close()
    unknown = Task(task_id="letters", policy_id="policy", prompt="x", environment="no.such.module:Env")
    publish(config, tasks=[unknown, *sums(2)], engines=[status("a")])
    with pipe_behind(config, steps=1) as pipe:
        run_worker(config, {"a": ScriptedClient()}, lambda w: pipe.done.is_set())
    assert {u.task_id for u in pipe.trajectories} == {"t0", "t1"}
    consumer = make_consumer(config.kafka, client_id="test")
    consumer.assign(partitions_of(consumer, topics.name(t.DEADLETTERS)))
    consumer.seek_to_beginning()
    letters: list[Any] = []
    wait_until(lambda: bool(letters.extend(poll_records(consumer)) or letters))
    consumer.close()
    letter = read_dead_letter(letters[0].headers)
    assert (letters[0].key, letters[0].value) == (b"bad", b"not arrow")
    assert (letter.stage, letter.topic, letter.offset) == ("rollout", topics.name(t.TASKS), 0)
    assert ("own", b"1") in letters[0].headers


def test_a_worker_that_starts_late_counts_what_already_waits_for_the_trainer(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    publish(config, tasks=sums(5), engines=[status("a")])
    full = (MAX_LAG + 1) * BATCH
    with pipe_behind(config, steps=1) as pipe:
        run_worker(config, {"a": ScriptedClient()}, lambda w: pipe.done.is_set() and w.ledger.ahead == full)
        second = ScriptedClient()
        worker, _ = run_worker(config, {"a": second}, lambda w: w.ledger.ahead == full)
    assert (worker.groups_opened, second.calls) == (0, 0)


def test_a_large_trajectory_goes_to_the_blob_store(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    config = config.model_copy(update={"store": config.store.model_copy(update={"inline_max_bytes": 1024})})
    publish(config, tasks=sums(1), engines=[status("a")])
    topics = t.Topics(namespace)
    run_worker(config, {"a": ScriptedClient()}, lambda w: w.ledger.unresolved >= GROUP)
    consumer = make_consumer(config.kafka, client_id="test")
    consumer.assign(partitions_of(consumer, topics.name(t.TRAJECTORIES)))
    consumer.seek_to_beginning()
    records: list[Any] = []
    wait_until(lambda: bool(records.extend(poll_records(consumer)) or records))
    consumer.close()
    store = BlobStore(config.store_uri)
    assert len(records[0].value) < 1024
    value = check_out(records[0].value, records[0].headers, store=store)
    assert TRAJECTORY.decode(value, records[0].headers).status is TrajectoryStatus.COMPLETED


def _aborted(pipe: Pipe) -> int:
    return sum(u.status is TrajectoryStatus.ABORTED for u in list(pipe.trajectories))


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def test_a_worker_without_a_task_that_can_be_rolled_out_ends_and_says_why(
    embedded_broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(embedded_broker, namespace, policy, tmp_path)
    unknown = Task(task_id="letters", policy_id="policy", prompt="x", environment="no.such.module:Env")
    publish(config, tasks=[unknown], engines=[status("a")])
    with pytest.raises(
        ConfigError, match=r"no task can be rolled out; the last one: letters: .*no\.such\.module"
    ):
        run_worker(config, {"a": ScriptedClient()}, lambda w: False)
