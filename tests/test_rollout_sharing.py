"""Several rollout workers share one capacity: no burst at a start or a restart, and a dead one's share is free again."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import ScriptedClient, write_policy
from test_rollout_worker import BATCH, GROUP, MAX_LAG, configured, pipe_behind, publish, status, sums

from headrace.producers.rollout import peers as peers_module
from headrace.producers.rollout.admission import Ledger
from headrace.producers.rollout.engine_pool import RetryRule
from headrace.producers.rollout.groups import GroupMaker
from headrace.producers.rollout.peers import CHANGE_SECONDS, HEARTBEAT_SECONDS, SESSION_SECONDS, Peers
from headrace.producers.rollout.tasks import TaskPool
from headrace.producers.rollout.tokenizing import load_tokenizer
from headrace.producers.rollout.worker import RolloutWorker
from headrace.schemas.task import Task
from headrace.schemas.worker import WORKER, WorkerStatus


@pytest.fixture(scope="session")
def broker(best_broker: Any) -> Any:
    """One kind is enough here."""
    return best_broker


FULL = (MAX_LAG + 1) * BATCH


def ledger(max_lag: int = MAX_LAG, batch: int = BATCH) -> Ledger:
    return Ledger(max_lag=max_lag, batch_size=batch, grace_ms=1000)


def started(book: Ledger, size: int, others: list[int]) -> int:
    """Rollouts that start in whole groups of `size` until no more may."""
    count = 0
    while book.may_start(size, others):
        book.start(f"r{count + i}" for i in range(size))
        count += size
    return count


def test_after_a_trainers_restart_at_version_v_capacity_is_that_of_v_and_no_more() -> None:
    """Whatever of the log is told again, in whatever order: (max_lag + 1) * batch may be ahead, at version 7 as at 0."""
    book = ledger()
    book.trained(7, [(0, 7 * BATCH)])
    for offset in range(7 * BATCH):
        book.sample(0, offset, f"old{offset}-0", f"old{offset}", admitted=True)
    book.trained(7, [(0, 7 * BATCH)])
    assert book.capacity == FULL
    assert started(book, GROUP, []) == FULL
    book.trained(8, [(0, 7 * BATCH)])  # an anchor after a mismatch: a version without samples
    book.trained(7, [(0, 7 * BATCH)])
    assert not book.may_start(GROUP)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_workers_that_know_of_each_other_stay_within_the_bound_together(count: int) -> None:
    """Each decides on what the others told a while ago: they may overshoot by a group each but one."""
    rng = random.Random(count)
    for _ in range(200):
        max_lag, batch, size = rng.randint(0, 4), rng.randint(1, 40), rng.randint(1, 16)
        books = [ledger(max_lag, batch) for _ in range(count)]
        told = [0] * count
        for step in range(100):
            i = rng.randrange(count)
            if books[i].may_start(size, told[:i] + told[i + 1 :]):
                books[i].start(f"{step}.{n}" for n in range(size))
            if rng.random() < 0.5:
                told[i] = books[i].outstanding
        most = max((max_lag + 1) * batch, batch - 1 + size)
        assert sum(book.outstanding for book in books) <= most + (count - 1) * size


def test_each_takes_an_equal_part_and_the_last_gap_is_filled_by_whoever_comes() -> None:
    assert started(ledger(1, 16), 4, [0]) == 16
    assert started(ledger(1, 16), 4, [24]) == 8
    assert started(ledger(0, 16), 16, [0, 0, 0]) == 16, "a group larger than the part"
    assert started(ledger(0, 16), 4, [14]) == 4, "less than a batch is ahead"


def test_a_worker_not_heard_of_for_a_session_is_dead() -> None:
    now = 0.0
    peers = Peers("a", "policy", now=lambda: now)
    for worker, policy in (("a", "policy"), ("b", "policy"), ("c", "policy"), ("d", "other")):
        peers.update(WorkerStatus(worker_id=worker, policy_id=policy, outstanding=3))
    assert peers.others == [3, 3]
    now = SESSION_SECONDS - 1
    peers.update(WorkerStatus(worker_id="b", policy_id="policy", outstanding=5))
    now = SESSION_SECONDS + 1
    assert peers.others == [5]
    peers.remove("b")
    assert peers.others == []


def test_a_worker_tells_its_count_when_it_changes_and_now_and_then() -> None:
    now = 0.0
    peers = Peers("a", "policy", now=lambda: now)
    told = peers.announcement(0, at_ms=7)
    assert told is not None and WORKER.decode(WORKER.encode(told)) == told
    assert peers.announcement(4, at_ms=7) is None, "too soon"
    now = CHANGE_SECONDS
    changed = peers.announcement(4, at_ms=7)
    assert changed is not None and changed.outstanding == 4
    now += HEARTBEAT_SECONDS - 0.01
    assert peers.announcement(4, at_ms=7) is None
    now += 0.02
    assert peers.announcement(4, at_ms=7) is not None


def order(seed: str, version: int) -> list[str]:
    pool = TaskPool("policy", seed)
    for i in range(20):
        pool.put(Task(task_id=f"t{i}", policy_id="policy", prompt="1+1="))
    pool.begin_at(version)
    return [task.task_id for _ in range(20) if (task := pool.next()) is not None]


def test_no_two_workers_go_through_the_tasks_in_step_and_a_restarted_one_begins_elsewhere() -> None:
    orders = [order("0:rollout-0", 0), order("0:rollout-1", 0), order("0:rollout-0", 5)]
    assert len({tuple(o) for o in orders}) == 3
    assert len({tuple(sorted(o)) for o in orders}) == 1
    assert order("0:rollout-0", 5) == orders[2]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def worker(config: Any, name: str) -> RolloutWorker:
    assert config.policy.model is not None
    maker = GroupMaker(config.rollout, load_tokenizer(config.policy.model))
    client = ScriptedClient()
    return RolloutWorker(config, name, maker=maker, connect=lambda url: client, retry=RetryRule(attempts=4))


async def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.02)


def test_three_workers_on_a_broker_feed_one_trainer_within_the_bound(
    broker: Any, namespace: str, policy: Path, tmp_path: Path
) -> None:
    config = configured(broker, namespace, policy, tmp_path)
    publish(config, tasks=sums(5), engines=[status("a")])
    with pipe_behind(config, steps=6) as pipe:

        async def serve() -> list[RolloutWorker]:
            workers = [worker(config, f"rollout-{n}") for n in range(3)]
            running = [asyncio.create_task(w.run()) for w in workers]
            try:
                await until(lambda: pipe.done.is_set())
                await until(lambda: all(w.ledger.outstanding == 0 for w in workers))
            finally:
                for w in workers:
                    w.stop()
                codes = await asyncio.gather(*running)
            assert codes == [0, 0, 0]
            return workers

        workers = asyncio.run(serve())
    assert pipe.most_ahead <= FULL + 2 * GROUP
    assert sum(w.groups_opened for w in workers) * GROUP == len(pipe.trajectories)
    assert all(w.groups_opened for w in workers)


def test_what_a_dead_worker_had_under_way_is_free_after_its_session(
    broker: Any, namespace: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "SESSION_SECONDS", 1.0)
    config = configured(broker, namespace, policy, tmp_path)
    publish(config, tasks=sums(5), engines=[status("a")])
    from headrace.schemas import topics as t
    from headrace.streams.kafka import make_producer

    producer = make_producer(config.kafka, client_id="dead")
    dead = WorkerStatus(worker_id="dead", policy_id="policy", outstanding=FULL)
    producer.send(t.Topics(namespace).name(t.WORKERS), key=b"dead", value=WORKER.encode(dead)).get(10)
    producer.close()

    async def serve() -> tuple[int, int]:
        alive = worker(config, "rollout-0")
        running = asyncio.create_task(alive.run())
        await until(lambda: alive.peers.others == [FULL])
        before = alive.groups_opened
        await until(lambda: alive.ledger.outstanding == FULL)
        alive.stop()
        await running
        return before, alive.groups_opened

    assert asyncio.run(serve()) == (0, FULL // GROUP)
