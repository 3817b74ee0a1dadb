"""A trainer that takes over right after the other's commit: what it reads as committed is that commit, not an older one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from trainer_world import POLICY, World

from headrace.consumers.trainer.history import read_history
from headrace.consumers.trainer.publish import Publisher, make_transactional
from headrace.consumers.trainer.source import open_source
from headrace.schemas import topics as t
from headrace.schemas.score import Ref
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord
from headrace.streams.blobs import BlobStore
from headrace.streams.kafka import closing, make_consumer, partitions_of

BLOB = WeightBlob(kind=BlobKind.ANCHOR, uri="weights/none", size=1, sha256="0" * 64)


def version(n: int, consumed: dict[int, int]) -> WeightRecord:
    return WeightRecord(
        policy_id=POLICY,
        version=n,
        base_version=None,
        base_hash=None,
        weights_hash=n,
        blobs=(BLOB,),
        consumed=tuple(sorted(consumed.items())),
    )


def take_over(world: World, repetitions: int, *, isolation: str = "read_committed") -> tuple[int, int, int]:
    """Commits by one trainer, each read at once by its successor: how many reads were old, of the offsets right after
    the commit, of those as the role reads them (the transactional producer first), and of the newest weight record.
    """
    topics, kafka = world.topics, world.config.kafka
    group, samples = topics.group("trainer", POLICY), topics.name(t.SAMPLES, POLICY)
    store = BlobStore(world.config.store_uri)
    old = [0, 0, 0]
    with (
        closing(
            make_consumer(kafka, client_id="next", group_id=group, isolation_level=isolation)
        ) as consumer,
        closing(make_consumer(kafka, client_id="log", isolation_level=isolation)) as log,
    ):
        partitions = partitions_of(consumer, samples)
        consumer.assign(partitions)
        producer = make_transactional(kafka, topics, POLICY)
        for n in range(repetitions):
            first = Publisher(producer, store, topics, POLICY, anchor_every=1)
            consumed = {tp.partition: n + 1 for tp in partitions}
            first.commit(version(n, consumed))
            old[0] += {tp.partition: consumer.committed(tp) for tp in partitions} != consumed
            first.commit(version(n, {p: offset + 1 for p, offset in consumed.items()}))
            producer = make_transactional(kafka, topics, POLICY)
            old[1] += {tp.partition: consumer.committed(tp) for tp in partitions} != {
                p: offset + 1 for p, offset in consumed.items()
            }
            newest = read_history(log, topics.name(t.WEIGHTS, POLICY)).newest
            old[2] += newest is None or newest.version != n
            first.close()
        producer.close()
    return old[0], old[1], old[2]


@pytest.mark.timeout(600)
def test_the_successor_reads_the_offsets_that_were_committed_just_now(
    kafka_broker: Any, namespace: str, tmp_path: Path
) -> None:
    world = World(kafka_broker.config, namespace, tmp_path)
    assert take_over(world, 100) == (0, 0, 0)


def test_so_it_does_on_three_nodes(kafka_cluster: Any, namespace: str, tmp_path: Path) -> None:
    world = World(kafka_cluster.config, namespace, tmp_path)
    assert take_over(world, 10) == (0, 0, 0)


def test_where_offsets_and_weight_record_differ_the_record_wins(
    kafka_broker: Any, namespace: str, tmp_path: Path
) -> None:
    """Whatever made the offsets old, what a version has consumed is not read again."""
    world = World(kafka_broker.config, namespace, tmp_path)
    made = world.feed(12, partition=0)
    topics = world.topics
    consumer = make_consumer(world.config.kafka, client_id="next", group_id=topics.group("trainer", POLICY))
    source = open_source(
        consumer, topics.name(t.SAMPLES, POLICY), batch_size=4, max_lag=0, finished={0: 8, 1: 0, 2: 0, 3: 0}
    )
    batch = source.next_batch(0, threading.Event())
    source.close()
    assert batch is not None
    assert [a.at for a in batch.admitted] == [Ref(0, offset) for offset in range(8, 12)]
    assert [a.sample.trajectory_id for a in batch.admitted] == [s.trajectory_id for s in made[8:]]
