"""Faust made safe: each rule on a consumer without a broker, beside what Faust itself does.

Then the only worker killed in a backlog: without the safe parts it lost 16 of 2,000. Storms are in test_storm.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faust.transport.drivers.aiokafka import Consumer
from faust.types import TP
from streams_records import a_trajectory, records_of, trajectory_headers
from streams_workers import StreamsProcess, config_for

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.config import Config
from headrace.schemas.sample import SAMPLE
from headrace.schemas.topics import SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams import metrics
from headrace.streams.app import create_app
from headrace.streams.kafka import closing, make_producer
from headrace.streams.safe_faust import SafeConsumer, SafeRecovery
from headrace.streams.watchdog import FROZEN_SECONDS, Reading, Watchdog
from headrace.streams.worker import RECOVERY_SECONDS, readings_of_consumer

INPUT = TP("input", 0)


class Broken:
    """A consumer that reads one partition of a pretended log: records are their offsets."""

    def __init__(
        self, kind: type[Consumer], folder: Path, *, end: int = 100, committed: int | None = 0
    ) -> None:
        config = Config.model_validate({"run": {"dir": str(folder)}, "kafka": {"bootstrap": "127.0.0.1:1"}})
        self.app = create_app(config)
        self.app.topics._acking_topics.add(INPUT.topic)
        self.app.topics.acks_enabled_for = lambda topic: True
        self.consumer = consumer = kind(
            self.app.transport, callback=self._take, on_partitions_revoked=None, on_partitions_assigned=None
        )
        self.app.consumer = consumer
        self.committed, self.earliest, self.end = committed, 0, end
        self.position = 0
        self.batches: list[list[int]] = []
        consumer.assignment = lambda: {INPUT}
        consumer.highwater = lambda tp: self.end
        consumer._getmany = self._fetch
        consumer.seek_to_committed = self._seek_to_committed
        consumer.seek_wait = self._seek_wait
        consumer._seek = self._seek
        consumer.earliest_offsets = lambda *tps: _result({tp: self.earliest for tp in tps})
        consumer.highwaters = lambda *tps: _result({tp: self.end for tp in tps})
        consumer._active_partitions = {INPUT}

    async def _take(self, message: Any) -> None:
        return None

    async def _fetch(self, active_partitions: Any, **limits: Any) -> dict[TP, list[Any]]:
        offsets = self.batches.pop(0) if self.batches else list(range(self.position, self.end))
        if offsets:
            self.position = offsets[-1] + 1
        return {INPUT: [record(o) for o in offsets]}

    async def _seek_to_committed(self) -> dict[TP, int | None]:
        if self.committed:
            self.position = self.committed
        return {INPUT: self.committed}

    async def _seek_wait(self, offsets: dict[TP, int]) -> None:
        self.position = offsets[INPUT]

    async def _seek(self, tp: TP, offset: int) -> None:
        self.position = offset

    async def read(self) -> list[int]:
        """The offsets of the next batch that come through."""
        messages: AsyncIterator[Any] = self.consumer.getmany(1.0)
        return [message.offset async for _, message in messages]

    def done(self, *offsets: int) -> None:
        """Records that the stream has acknowledged, in this order."""
        for offset in offsets:
            self.consumer._acked[INPUT].append(offset)
            self.consumer._acked_index[INPUT].add(offset)

    def may_commit(self) -> int | None:
        return self.consumer._new_offset(INPUT)


def record(offset: int) -> Any:
    return SimpleNamespace(
        topic=INPUT.topic,
        partition=0,
        offset=offset,
        timestamp=0,
        timestamp_type=0,
        headers=(),
        key=b"",
        value=b"",
        checksum=None,
        serialized_key_size=0,
        serialized_value_size=0,
    )


async def _result(value: Any) -> Any:
    return value


def on_a_loop(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 30))  # type: ignore[arg-type]


def test_a_jump_over_unread_records_is_sought_back_and_never_committed(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=10, committed=2)
        await log.consumer.perform_seek()
        log.batches = [[2, 3], [7, 8, 9]]  # 4 to 6 were fetched and thrown away in a rebalance
        assert await log.read() == [2, 3]
        assert await log.read() == []
        assert await log.read() == [4, 5, 6, 7, 8, 9]
        log.done(2, 3, 7, 8, 9)
        await log.consumer._add_gap(INPUT, 4, 7)
        assert log.may_commit() == 4

    on_a_loop(body)


def test_faust_itself_commits_past_the_unread_records(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(Consumer, tmp_path, end=10, committed=2)
        await log.consumer.perform_seek()
        log.batches = [[2, 3], [7, 8, 9]]
        assert await log.read() == [2, 3]
        assert await log.read() == [7, 8, 9]
        log.done(2, 3, 7, 8, 9)
        await log.consumer._add_gap(INPUT, 4, 7)
        assert (log.may_commit() or 0) > 4, "Faust got better: is the safe consumer still needed?"

    on_a_loop(body)


def test_records_below_the_one_that_is_due_are_skipped(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=6, committed=2)
        await log.consumer.perform_seek()
        log.batches = [[0, 1, 2, 3], [2, 3, 4, 5]]
        assert await log.read() + await log.read() == [2, 3, 4, 5]

    on_a_loop(body)


def test_nothing_comes_through_between_a_revocation_and_the_next_seek(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=6, committed=2)
        await log.consumer.perform_seek()
        log.consumer._forget({INPUT})
        assert await log.read() == []
        await log.consumer.perform_seek()
        assert await log.read() == [2, 3, 4, 5]

    on_a_loop(body)


@pytest.mark.parametrize("late", [[4], [3, 4], [4, 3]])
def test_acknowledgements_out_of_order_commit_nothing_before_the_head(
    tmp_path: Path, late: list[int]
) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, committed=2)
        await log.consumer.perform_seek()
        log.done(*late)
        assert log.may_commit() is None
        log.done(2)
        assert log.may_commit() == (5 if len(late) == 2 else 3)

    on_a_loop(body)


def test_the_first_record_after_the_committed_offset_is_not_skipped(tmp_path: Path) -> None:
    async def body() -> None:
        for kind, committed in ((SafeConsumer, None), (Consumer, 5)):
            log = Broken(kind, tmp_path, committed=2)
            await log.consumer.perform_seek()
            log.done(3, 4)  # 2 is not done
            assert log.may_commit() == committed

    on_a_loop(body)


def test_nothing_is_committed_while_the_start_is_unknown(tmp_path: Path) -> None:
    async def body() -> None:
        for kind, committed in ((SafeConsumer, None), (Consumer, 8)):
            log = Broken(kind, tmp_path)
            log.done(7)  # comes late, from before a revocation
            assert log.may_commit() == committed

    on_a_loop(body)


def test_a_partition_that_was_never_committed_starts_at_its_earliest_record(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=4, committed=None)
        log.position = 3
        await log.consumer.perform_seek()
        assert await log.read() == [0, 1, 2, 3]
        log.done(1)
        assert log.may_commit() is None
        log.done(0)
        assert log.may_commit() == 2

    on_a_loop(body)


def test_what_retention_took_is_counted_and_passed_over(tmp_path: Path) -> None:
    async def body() -> None:
        before = metrics.records_expired._value.get()
        log = Broken(SafeConsumer, tmp_path, end=9, committed=2)
        log.earliest = 6
        await log.consumer.perform_seek()
        assert await log.read() == [6, 7, 8]
        assert metrics.records_expired._value.get() == before + 4

    on_a_loop(body)


def test_a_broker_that_lost_its_tail_does_not_stop_the_reader(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=5, committed=8)
        await log.consumer.perform_seek()
        log.end = 7
        assert await log.read() == [5, 6]

    on_a_loop(body)


def test_a_head_that_nobody_works_on_is_read_again_after_two_seconds(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=6, committed=2)
        await log.consumer.perform_seek()
        assert await log.read() == [2, 3, 4, 5]
        log.done(3, 4)
        assert log.consumer._long_missing(100.0) == []
        assert log.consumer._long_missing(101.9) == []
        assert log.consumer._long_missing(102.0) == [INPUT]
        await log.consumer._reread(INPUT)
        assert await log.read() == [2, 3, 4, 5]
        log.done(2)
        assert log.may_commit() == 5
        log.consumer._committed_offset[INPUT] = 5
        assert log.consumer._long_missing(200.0) == []

    on_a_loop(body)


def test_a_head_at_work_is_left_alone(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, committed=2)
        await log.consumer.perform_seek()
        log.done(3)
        head = log.consumer._to_message(INPUT, record(2))
        log.consumer._unacked_messages.add(head)
        log.consumer._long_missing(100.0)
        assert log.consumer._long_missing(200.0) == []

    on_a_loop(body)


def test_a_partition_without_a_start_is_sought_anew(tmp_path: Path) -> None:
    async def body() -> None:
        log = Broken(SafeConsumer, tmp_path, end=4, committed=1)
        log.consumer._long_missing(0.0)
        assert log.consumer._long_missing(2.0) == [INPUT]
        await log.consumer._reread(INPUT)
        assert await log.read() == [1, 2, 3]

    on_a_loop(body)


def test_the_app_is_built_with_the_safe_parts(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path)}, "kafka": {"bootstrap": "127.0.0.1:1"}})
    app = create_app(config)
    assert isinstance(app.consumer, SafeConsumer)
    assert isinstance(app.tables.recovery, SafeRecovery)
    assert app.conf.topic_disable_leader and not app.conf.topic_allow_declare and not app.conf.web_enabled


def test_static_members_get_a_name_of_their_own(tmp_path: Path) -> None:
    tree = {"run": {"dir": str(tmp_path)}, "kafka": {"bootstrap": "127.0.0.1:1", "static_members": True}}
    app = create_app(Config.model_validate(tree))
    assert app.conf.consumer_group_instance_id == "headrace.streams-0"
    assert app.conf.id == "headrace.streams"


def test_the_watchdog_bites_only_what_is_behind_and_does_not_move() -> None:
    dog = Watchdog()

    def at(now: float, **positions: tuple[int, bool]) -> list[str]:
        return dog.stalled(now, {n: Reading(p, behind, 15.0) for n, (p, behind) in positions.items()})

    assert at(0, stuck=(5, True), idle=(7, False), slow=(1, True)) == []
    assert at(8, stuck=(5, True), idle=(7, False), slow=(1, True)) == []
    assert at(14, stuck=(5, True), idle=(7, False), slow=(2, True)) == []
    assert at(15, stuck=(5, True), idle=(7, False), slow=(2, True)) == ["stuck"]
    assert at(16, idle=(7, True), slow=(2, True)) == []
    assert at(25, idle=(7, True), slow=(2, True)) == []
    assert at(29, stuck=(5, True), slow=(2, True)) == ["slow"]


def test_a_process_that_was_frozen_gets_its_time_anew() -> None:
    dog = Watchdog()
    stuck = {"p": Reading(1, True, 15.0)}
    assert dog.stalled(0.0, stuck) == []
    assert dog.stalled(FROZEN_SECONDS + 10.0, stuck) == []
    assert dog.stalled(FROZEN_SECONDS + 19.0, stuck) == []
    assert dog.stalled(FROZEN_SECONDS + 25.0, stuck) == ["p"]


def with_holes(folder: Path, holes: list[tuple[int, int]], **log: int) -> tuple[Broken, list[int]]:
    """A log whose broker knows of `holes`, and the offsets for which it has been asked."""
    asked: list[int] = []

    def look(topic: str, partition: int, offset: int) -> list[tuple[int, int]]:
        asked.append(offset)
        return [h for h in holes if h[0] >= offset]

    broken = Broken(SafeConsumer, folder, **log)
    broken.consumer._look = look
    return broken, asked


def test_a_hole_that_the_broker_confirms_is_passed_and_committed_past(tmp_path: Path) -> None:
    async def body() -> None:
        before = metrics.offsets_without_record._value.get()
        log, asked = with_holes(tmp_path, [(4, 7), (9, 12)], end=14, committed=2)
        await log.consumer.perform_seek()
        log.batches = [[2, 3, 7, 8, 12, 13]]
        assert await log.read() == [2, 3, 7, 8, 12, 13]
        assert asked == [4], "one look tells of the holes that follow too"
        assert metrics.offsets_without_record._value.get() == before + 6
        log.done(2, 3, 7, 8, 12, 13)
        for wanted in (7, 12, 14):
            assert log.may_commit() == wanted
            log.consumer._committed_offset[INPUT] = wanted

    on_a_loop(body)


def test_a_jump_that_is_no_hole_is_sought_back_though_the_broker_knows_of_a_later_hole(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        log, asked = with_holes(tmp_path, [(8, 9)], end=12, committed=2)
        await log.consumer.perform_seek()
        log.batches = [[2, 3], [9, 10], [4, 5, 6, 7, 9, 10]]
        assert await log.read() == [2, 3]
        assert await log.read() == []
        assert await log.read() == [4, 5, 6, 7, 9, 10]
        assert asked == [4]

    on_a_loop(body)


def test_a_hole_at_the_end_is_committed_past_once_it_has_lasted(tmp_path: Path) -> None:
    async def body() -> None:
        log, _ = with_holes(tmp_path, [(4, 10)], end=10, committed=2)
        await log.consumer.perform_seek()
        log.batches = [[2, 3]]
        assert await log.read() == [2, 3]
        log.done(2, 3)
        assert log.consumer._long_idle(100.0) == []
        assert log.consumer._long_idle(102.0) == [INPUT]
        assert await log.consumer._passed(INPUT, 4, None) == 10
        assert log.consumer._long_idle(200.0) == []
        assert log.may_commit() == 10
        assert log.consumer.past_holes(INPUT, 4) == 10

    on_a_loop(body)


def test_an_end_that_nothing_readable_leads_to_is_asked_about_at_growing_distance(tmp_path: Path) -> None:
    async def body() -> None:
        log, _ = with_holes(tmp_path, [], end=10, committed=10)
        await log.consumer.perform_seek()
        log.end = 12  # an open transaction
        times = [t for t in range(200) if log.consumer._long_idle(float(t))]
        assert times == [2, 6, 14, 30, 60, 90, 120, 150, 180]

    on_a_loop(body)


def test_a_partition_that_went_away_while_the_broker_was_asked_gives_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        log, _ = with_holes(tmp_path, [(4, 7)], end=10, committed=2)
        await log.consumer.perform_seek()
        look = log.consumer._look

        def revoked_meanwhile(topic: str, partition: int, offset: int) -> list[tuple[int, int]]:
            log.consumer._forget({INPUT})
            found: list[tuple[int, int]] = look(topic, partition, offset)
            return found

        log.consumer._look = revoked_meanwhile
        log.batches = [[2, 3, 7, 8]]
        assert await log.read() == [2, 3]
        assert log.consumer.past_holes(INPUT, 4) == 4

    on_a_loop(body)


def test_a_rebalance_while_one_idle_partition_is_asked_about_leaves_the_others_alone(tmp_path: Path) -> None:
    async def body() -> None:
        log, asked = with_holes(tmp_path, [(4, 7)], end=10, committed=4)
        await log.consumer.perform_seek()
        other = TP("input", 1)
        log.consumer._due[other] = 4
        look = log.consumer._look

        def revoked_meanwhile(topic: str, partition: int, offset: int) -> list[tuple[int, int]]:
            log.consumer._forget({INPUT, other})
            found: list[tuple[int, int]] = look(topic, partition, offset)
            return found

        log.consumer._look = revoked_meanwhile
        await log.consumer._pass_holes([INPUT, other])
        assert asked == [4]

    on_a_loop(body)


def test_a_recovery_of_tables_has_a_limit_of_its_own_and_the_input_waits_for_it() -> None:
    recovery = SimpleNamespace(
        in_recovery=True, active_offsets={TP("changelog", 0): 7, TP("changelog", 1): None}
    )
    app: Any = SimpleNamespace(
        _assignment=set(),
        rebalancing_count=1,
        rebalancing=False,
        consumer=SimpleNamespace(
            committed=lambda: {INPUT: 3},
            past_holes=lambda tp, offset: max(offset, 5),
            delivered=lambda: {INPUT: 3, TP("other", 0): 40, TP("other", 1): None},
        ),
        tables=SimpleNamespace(recovery=recovery),
    )

    def ends(pairs: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        return dict.fromkeys(pairs, 5)

    def behind() -> dict[str, Reading]:
        return {n: r for n, r in readings_of_consumer(app, 15.0, ends, slow_s=9.0).items() if r.behind}

    assert behind() == {"the recovery of tables": Reading(7, True, RECOVERY_SECONDS)}
    recovery.in_recovery = False
    assert behind() == {"input-0": Reading(3, True, 24.0)}
    at_a_hole = readings_of_consumer(app, 15.0, ends, taken_of="input", taken=lambda: {0: 4})
    assert not at_a_hole["input-0"].behind, "nothing but a hole is left"


def test_what_one_loop_hands_over_of_other_topics_keeps_the_watchdog_quiet() -> None:
    other = TP("other", 0)
    delivered = {INPUT: 3, other: 40}
    app: Any = SimpleNamespace(
        _assignment=set(),
        rebalancing_count=1,
        rebalancing=False,
        consumer=SimpleNamespace(
            committed=lambda: {INPUT: 3, other: 40},
            past_holes=lambda tp, offset: offset,
            delivered=lambda: delivered,
        ),
        tables=SimpleNamespace(recovery=SimpleNamespace(in_recovery=False)),
    )
    dog = Watchdog()

    def at(now: float) -> list[str]:
        def ends(pairs: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
            return {pair: 100 if pair[0] == "input" else 40 for pair in pairs}

        return dog.stalled(now, readings_of_consumer(app, 15.0, ends, taken_of="input", taken=lambda: {0: 3}))

    assert at(0) == at(9) == []
    delivered[other] = 41  # a backlog of the other topic passes first
    assert at(18) == at(27) == []
    assert at(33.5) == ["input-0"], "nothing moves any more"


GROUP = 4


class Load:
    """Trajectories in groups of four; remembers what it sent."""

    def __init__(self, config: Config) -> None:
        self._config, self._topics = config, Topics(config.run.namespace)
        self.sent: list[str] = []

    def send(self, producer: Any, groups: int) -> None:
        for _ in range(groups):
            group = len(self.sent) // GROUP
            for i in range(GROUP):
                t = a_trajectory(
                    f"{group}-{i}", group=f"g{group}", size=GROUP, answer=f"8{5 if i % 2 else 4}$"
                )
                producer.send(
                    self._topics.name(TRAJECTORIES),
                    key=t.rollout_id.encode(),
                    value=TRAJECTORY.encode(t),
                    headers=trajectory_headers(t),
                )
                self.sent.append(t.trajectory_id)

    def check(self, timeout_s: float) -> int:
        """Every trajectory has a sample, whole in its group and equal each time; the number of repeats."""
        topic = self._topics.name(SAMPLES, "policy")
        found: dict[str, float | None] = {}
        repeats = 0
        for r in records_of(self._config.kafka, topic, timeout_s=timeout_s):
            sample = SAMPLE.decode(r.value, r.headers)
            assert sample.reason is None, (sample.trajectory_id, sample.reason)
            assert sample.group_valid == GROUP, (sample.trajectory_id, sample.group_valid)
            repeats += sample.trajectory_id in found
            assert found.setdefault(sample.trajectory_id, sample.advantage) == sample.advantage
            if len(found) == len(self.sent):
                break
        missing = sorted(set(self.sent) - set(found))
        assert not missing, f"{len(missing)} of {len(self.sent)} missing, such as {missing[:5]}"
        return repeats


@pytest.mark.storm
def test_the_only_worker_killed_in_a_backlog_and_replaced_loses_nothing(
    kafka_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(kafka_broker.config, namespace, tmp_path)
    load = Load(config)
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        load.send(producer, 500)
        producer.flush()
    scores = Topics(namespace).name(SCORES)
    worker = StreamsProcess(config, tmp_path)
    try:
        for wanted in (200, 900):
            for count, _ in enumerate(records_of(config.kafka, scores, timeout_s=60.0)):
                if count >= wanted:
                    break
            worker.kill()
            worker = StreamsProcess(config, tmp_path)
        print(f"{load.check(timeout_s=120.0)} repeats")
    finally:
        worker.kill()
        print(worker.log.read_text()[-3000:])
