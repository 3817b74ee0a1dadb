"""The feedback join: scores wait in a table for outcomes, and go out when their rollout settles.

    trajectories --verify--> keep() --+
                                      +--> table `outcomes` --tick(), both topics read past the hour--> scores
    feedback -----------> run() ------+

The table holds one fact per record (a waiting score, an outcome, a settled trajectory), a function of that
record alone, so that writing it twice, or by a worker that was frozen, does no harm. A record is acknowledged
when its fact's changelog record is delivered; a trajectory is marked settled when its score is delivered.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import faust
from faust.types import TP

from ..schemas.codec import TRACE_HEADER, Headers, header
from ..schemas.config import FeedbackConfig
from ..schemas.errors import InvalidMessageError
from ..schemas.feedback import FEEDBACK
from ..schemas.score import SCORE, Score
from ..schemas.topics import FEEDBACK as FEEDBACK_TOPIC
from ..schemas.topics import SCORES, TRAJECTORIES, Topics
from . import metrics
from .deadletters import DeadLetters, headers_of
from .feedback_book import Fate, FeedbackBook, Forgotten, JoinRule, Settled
from .outbox import Outbox
from .verify import score_headers

logger = logging.getLogger(__name__)

STAGE = "feedback"
TABLE = "outcomes"
TICK_SECONDS = 0.25
CLOCK_GRACE_MS = 1000
"""How far the brokers' clocks may differ from this one."""
WAITING, OUTCOME, SETTLED = b"w", b"o", b"s"
_FACT = struct.Struct(">ciqH")
"""Kind, partition, append time in Unix milliseconds, length of the trace context; then that and the payload."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One value of the table."""

    kind: bytes
    partition: int
    at_ms: int
    trace: bytes = b""
    payload: bytes = b""
    """The encoded score or outcome."""

    def encode(self) -> bytes:
        """As bytes."""
        head = _FACT.pack(self.kind, self.partition, self.at_ms, len(self.trace))
        return head + self.trace + self.payload

    @classmethod
    def decode(cls, value: bytes) -> Fact:
        """The inverse."""
        kind, partition, at_ms, length = _FACT.unpack_from(value)
        start = _FACT.size
        return cls(kind, partition, at_ms, value[start : start + length], value[start + length :])


def trajectory_key(rollout_id: str, trajectory_id: str) -> bytes:
    """Of a waiting or settled trajectory."""
    return b"t\0" + rollout_id.encode() + b"\0" + trajectory_id.encode()


def outcome_key(rollout_id: str, feedback_id: str) -> bytes:
    """Of an outcome."""
    return b"o\0" + rollout_id.encode() + b"\0" + feedback_id.encode()


@dataclass(slots=True)
class _Partition:
    generation: int
    book: FeedbackBook
    barrier_ms: int | None = None
    """Once both topics are done up to `ends`, everything appended before this is known."""
    ends: dict[TP, int] = field(default_factory=dict)


class FeedbackJoin:
    """Holds back scores of this worker's partitions."""

    def __init__(self, config: FeedbackConfig, topics: Topics, outbox: Outbox, app: faust.App) -> None:
        self._rule = JoinRule.of(config)
        self._extension_ms = config.extension_ms
        self._outbox, self._app = outbox, app
        self._scores = topics.name(SCORES)
        self._inputs = (topics.name(TRAJECTORIES), topics.name(FEEDBACK_TOPIC))
        self._table: Any = app.Table(TABLE, key_type=bytes, value_type=bytes)
        self._changelog = topics.changelog("streams", TABLE)
        self._dead_letters = DeadLetters(outbox, topics, STAGE)
        self._partitions: dict[int, _Partition] = {}
        self._sending: set[asyncio.Task[Any]] = set()
        self._unsent: dict[str, set[asyncio.Task[bool]]] = {}
        """rollout_id -> sendings of its scores that have not ended."""

    async def run(self, stream: Any) -> None:
        """The agent: every event of `stream`, of the topic `feedback`."""
        try:
            async for event in stream.noack().events():
                await self.take(event)
        except Exception as e:
            self._outbox.fail(e)
            raise

    def extended(self, score: Score) -> Score:
        """`score` with the later deadline that all members of its group get: none of them settles after it."""
        return replace(score, group_deadline_ms=score.group_deadline_ms + self._extension_ms)

    async def keep(self, event: Any, score: Score, headers: Headers) -> asyncio.Future[Any] | None:
        """Let `score`, made from the trajectory in `event`, wait; the future is when it is safe.

        None where it has settled before, or where `event` is of a former generation (it comes again).
        """
        state = self._state_of(event.message)
        if state is None:
            return None
        at_ms = int(event.message.timestamp * 1000)
        if not state.book.add_score(score, at_ms):
            return _done()
        trace = (header(headers, TRACE_HEADER) or "").encode()
        fact = Fact(WAITING, event.message.partition, at_ms, trace[:1024], SCORE.encode(score))
        return await self._write(trajectory_key(score.rollout_id, score.trajectory_id), fact)

    async def take(self, event: Any) -> None:
        """Put one outcome beside its rollout."""
        message = event.message
        try:
            feedback = FEEDBACK.decode(event.value, headers_of(message))
            if message.key != feedback.rollout_id.encode():
                raise InvalidMessageError(
                    "feedback_key", "the record's key must be the rollout_id, or it meets no trajectory"
                )
        except InvalidMessageError as e:
            self._done_after(event, await self._dead_letters.send(message, e))
            return
        state = self._state_of(message)
        if state is None:
            return
        at_ms = int(message.timestamp * 1000)
        fate = state.book.add_outcome(feedback, at_ms)
        metrics.feedback_outcomes.labels(fate=fate.value).inc()
        if fate is Fate.TAKEN:
            fact = Fact(OUTCOME, message.partition, at_ms, payload=FEEDBACK.encode(feedback))
            sent = await self._write(outcome_key(feedback.rollout_id, feedback.feedback_id), fact)
        else:
            sent = _done()
        self._done_after(event, sent)

    async def tick(self, now_ms: int) -> None:
        """Settle what is due in partitions of which everything until then is known."""
        if self._app.rebalancing or self._app.tables.recovery.in_recovery:
            return
        generation = self._app.consumer_generation_id
        for partition in self._assigned():
            state = self._state(partition, generation)
            await self._advance(partition, state, now_ms)
        metrics.feedback_pending.set(sum(len(s.book) for s in self._partitions.values()))

    async def _advance(self, partition: int, state: _Partition, now_ms: int) -> None:
        nearest = state.book.nearest_ms
        if nearest is None:
            return
        if state.barrier_ms is None:
            if now_ms - CLOCK_GRACE_MS <= nearest:
                return
            tps = [TP(topic, partition) for topic in self._inputs]
            ends = await self._app.consumer.highwaters(*tps)
            state.ends = {tp: ends.get(tp) or 0 for tp in tps}
            state.barrier_ms = now_ms - CLOCK_GRACE_MS
        committed = self._app.consumer.committed()
        if state.generation != self._app.consumer_generation_id:
            return
        if any((committed.get(tp) or 0) < end for tp, end in state.ends.items()):
            return
        settled, forgotten = state.book.advance(state.barrier_ms)
        state.barrier_ms = None
        by_rollout: dict[str, list[Settled]] = {}
        for one in settled:
            by_rollout.setdefault(one.score.rollout_id, []).append(one)
        for rollout_id, ones in by_rollout.items():
            task = self._start(self._send(partition, ones))
            self._unsent.setdefault(rollout_id, set()).add(task)
            task.add_done_callback(partial(self._sent, rollout_id))
        for rollout in forgotten:
            # After a long absence a rollout is settled and forgotten at once.
            before = set(self._unsent.get(rollout.rollout_id, ()))
            self._start(self._forget(partition, rollout, before))

    async def _send(self, partition: int, ones: list[Settled]) -> bool:
        """Deliver the scores of one rollout, then mark them settled; False where that is another worker's now."""
        for one in ones:
            score = one.score
            key = trajectory_key(score.rollout_id, score.trajectory_id)
            value = self._table.data.get(key)
            if value is None:  # the partition was taken away meanwhile; its new owner sends this
                return False
            kept = Fact.decode(value)
            headers: Headers = [(TRACE_HEADER, kept.trace)] if kept.trace else []
            metrics.count_score(score.status.value, score.reason)
            metrics.feedback_settled.labels(cause=one.cause.value).inc()
            await (
                await self._outbox.send(
                    self._scores,
                    score.group_id.encode(),
                    SCORE.encode(score),
                    score_headers(score, headers),
                )
            )
            await self._write(key, Fact(SETTLED, partition, kept.at_ms))
        return True

    def _sent(self, rollout_id: str, task: asyncio.Task[bool]) -> None:
        self._unsent[rollout_id].discard(task)
        if not self._unsent[rollout_id]:
            del self._unsent[rollout_id]

    async def _forget(self, partition: int, rollout: Forgotten, before: set[asyncio.Task[bool]]) -> None:
        """Once its scores are delivered by `before`: what waits in the table is all that a restart would know.

        Outcomes first: a crash in between leaves the marks, not outcomes that look unknown.
        """
        if before and not all(await asyncio.gather(*before)):
            return
        if rollout.unknown:
            metrics.feedback_outcomes.labels(fate="unknown").inc(len(rollout.outcomes))
            logger.warning(
                "%d outcomes of no trajectory: rollout=%s", len(rollout.outcomes), rollout.rollout_id
            )
        keys = [outcome_key(rollout.rollout_id, o) for o in rollout.outcomes]
        keys += [trajectory_key(rollout.rollout_id, t) for t in rollout.trajectories]
        for key in keys:
            self._table.data.pop(key, None)
            await self._outbox.send(self._changelog, key, None, [], partition=partition)

    async def _write(self, key: bytes, fact: Fact) -> asyncio.Future[Any]:
        """Not by `table[key] = ...`: that works inside an agent's event only, and tells no delivery."""
        value = fact.encode()
        self._table.data[key] = value
        return await self._outbox.send(self._changelog, key, value, [], partition=fact.partition)

    def _state_of(self, message: Any) -> _Partition | None:
        if message.generation_id != self._app.consumer_generation_id:
            return None
        return self._state(message.partition, message.generation_id)

    def _state(self, partition: int, generation: int) -> _Partition:
        state = self._partitions.get(partition)
        if state is None or state.generation != generation:
            self._rebuild(generation)
            state = self._partitions.setdefault(partition, _Partition(generation, FeedbackBook(self._rule)))
        return state

    def _rebuild(self, generation: int) -> None:
        """The books of all partitions from the recovered table; what is left of others is thrown out."""
        assigned = self._assigned()
        states = {p: _Partition(generation, FeedbackBook(self._rule)) for p in assigned}
        facts = [(key, Fact.decode(value)) for key, value in self._table.data.items()]
        # Marks last: beside one alone an outcome would be late, and then never be removed from the table.
        for key, fact in sorted(facts, key=lambda item: item[1].kind == SETTLED):
            if fact.partition not in states:
                del self._table.data[key]
                continue
            book = states[fact.partition].book
            if fact.kind == WAITING:
                book.add_score(SCORE.decode(fact.payload), fact.at_ms)
            elif fact.kind == OUTCOME:
                book.add_outcome(FEEDBACK.decode(fact.payload), fact.at_ms)
            else:
                _, rollout_id, trajectory_id = key.decode().split("\0", 2)
                book.add_settled(rollout_id, trajectory_id, fact.at_ms)
        self._partitions = states
        logger.info("outcomes: %d facts of partitions=%s", len(self._table.data), sorted(assigned))

    def _assigned(self) -> set[int]:
        return {tp.partition for tp in self._app.consumer.assignment() if tp.topic in self._inputs}

    def _start(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._outbox.fail(error)

    def _done_after(self, event: Any, delivery: asyncio.Future[Any]) -> None:
        def done() -> None:
            metrics.stage_records.labels(stage=STAGE).inc()
            event.ack()

        self._outbox.after([delivery], done)


def _done() -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
