"""The feedback join without a broker: what a slow delivery, or a long absence, may not lose."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from faust.types import TP
from streams_records import a_score

from headrace.schemas.config import FeedbackConfig
from headrace.schemas.feedback import FEEDBACK, Feedback
from headrace.schemas.score import SCORE
from headrace.schemas.topics import SCORES, Topics
from headrace.streams.feedback import (
    OUTCOME,
    SETTLED,
    TABLE,
    WAITING,
    Fact,
    FeedbackJoin,
    outcome_key,
    trajectory_key,
)

WINDOW_MS = 1000
TOPICS = Topics("t")
LONG_AFTER = 100 * WINDOW_MS


class SlowOutbox:
    """Keeps what is sent, delivers when told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, bytes | None]] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.failed: list[BaseException] = []

    async def send(
        self, topic: str, key: bytes, value: bytes | None, headers: Any, *, partition: int | None = None
    ) -> asyncio.Future[None]:
        self.sent.append((topic, key, value))
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return future

    async def deliver(self) -> None:
        """One record, and all that follows from it."""
        self.waiting.pop(0).set_result(None)
        await settle_down()

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

    @property
    def scores(self) -> list[bytes]:
        return [value for topic, _, value in self.sent if topic == TOPICS.name(SCORES) and value is not None]

    @property
    def removed(self) -> list[bytes]:
        return [
            key
            for topic, key, value in self.sent
            if topic == TOPICS.changelog("streams", TABLE) and value is None
        ]


async def settle_down() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def a_join(data: dict[bytes, bytes]) -> tuple[FeedbackJoin, SlowOutbox]:
    """One that has just recovered `data`, of partition 0, all of whose input is read."""
    tps = {TP(TOPICS.name(topic), 0): 9 for topic in _inputs()}

    async def highwaters(*wanted: TP) -> dict[TP, int]:
        return {tp: tps[tp] for tp in wanted}

    app: Any = SimpleNamespace(
        Table=lambda *args, **kwargs: SimpleNamespace(data=data),
        rebalancing=False,
        consumer_generation_id=1,
        tables=SimpleNamespace(recovery=SimpleNamespace(in_recovery=False)),
        consumer=SimpleNamespace(assignment=lambda: set(tps), committed=lambda: tps, highwaters=highwaters),
    )
    outbox: Any = SlowOutbox()
    config = FeedbackConfig(enabled=True, weights={"accepted": 1.0}, window_seconds=WINDOW_MS / 1000)
    return FeedbackJoin(config, TOPICS, outbox, app), outbox


def _inputs() -> tuple[Any, Any]:
    from headrace.schemas.topics import FEEDBACK as FEEDBACK_TOPIC
    from headrace.schemas.topics import TRAJECTORIES

    return TRAJECTORIES, FEEDBACK_TOPIC


def waiting_facts(count: int) -> dict[bytes, bytes]:
    scores = [a_score("r", trajectory_index=i, trajectory_count=count) for i in range(count)]
    return {
        trajectory_key("r", s.trajectory_id): Fact(WAITING, 0, 0, payload=SCORE.encode(s)).encode()
        for s in scores
    }


def an_outcome_fact() -> tuple[bytes, bytes]:
    outcome = Feedback(feedback_id="f", rollout_id="r", name="accepted", value=1.0, event_ms=0)
    return outcome_key("r", "f"), Fact(OUTCOME, 0, 0, payload=FEEDBACK.encode(outcome)).encode()


def test_after_a_long_absence_a_rollout_is_forgotten_only_when_all_its_scores_are_delivered() -> None:
    async def scenario() -> None:
        data = waiting_facts(2)
        join, outbox = await a_join(data)
        await join.tick(LONG_AFTER)
        await settle_down()
        while outbox.waiting:
            if len(outbox.scores) < 2 or any(Fact.decode(v).kind == WAITING for v in data.values()):
                assert outbox.removed == []
            await outbox.deliver()
        assert [SCORE.decode(value).trajectory_id for value in outbox.scores] == ["r.0", "r.1"]
        assert sorted(outbox.removed) == sorted(waiting_facts(2))
        assert (data, outbox.failed, join._unsent) == ({}, [], {})

    asyncio.run(scenario())


def test_nothing_is_forgotten_when_the_partition_went_away_before_its_scores_were_sent() -> None:
    async def scenario() -> None:
        data = waiting_facts(2)
        join, outbox = await a_join(data)
        await join.tick(LONG_AFTER)
        await settle_down()
        data.clear()
        while outbox.waiting:
            await outbox.deliver()
        assert outbox.removed == []

    asyncio.run(scenario())


def test_an_outcome_beside_a_settled_trajectory_is_removed_with_it_after_a_restart() -> None:
    async def scenario() -> None:
        key, value = an_outcome_fact()
        data = {trajectory_key("r", "r.0"): Fact(SETTLED, 0, 0).encode(), key: value}
        join, outbox = await a_join(data)
        await join.tick(LONG_AFTER)
        await settle_down()
        await join.tick(LONG_AFTER)
        await settle_down()
        assert sorted(outbox.removed) == sorted([key, trajectory_key("r", "r.0")])
        assert data == {}

    asyncio.run(scenario())
