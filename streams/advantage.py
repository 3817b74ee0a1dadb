"""The advantage stage: scores -> samples, a group at a time, through the staleness gate.

The events of an open group stay unacknowledged, so a worker that takes over reads them again; a group's
samples are delivered before its events are acknowledged. State belongs to one generation of the consumer
group: after a rebalance it is built anew, and what still comes from before is passed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import faust
from faust.types import TP

from ..schemas.codec import TRACE_HEADER, Headers
from ..schemas.config import Config
from ..schemas.errors import ConfigError, InvalidMessageError
from ..schemas.sample import SAMPLE, Fate, Sample, sample_headers
from ..schemas.score import SCORE, Score
from ..schemas.topics import SAMPLES, SCORES, Topics, checked_name
from . import metrics
from .baselines import RECALL_FACTOR, Baselines
from .deadletters import DeadLetters, headers_of
from .fates import FateRule, fates_of, late_fate
from .gate import VersionBook, VersionFollower, observe_lag
from .groups import CLOCK_GRACE_MS, REMEMBER_MS, ClosedGroup, GroupBook, Verdict
from .kafka import create_topics
from .outbox import Outbox
from .recall import observe_before, recall_before

logger = logging.getLogger(__name__)

STAGE = "advantage"
TICK_SECONDS = 0.25

_RECORDS = metrics.stage_records.labels(stage=STAGE)


@dataclass(slots=True)
class PartitionState:
    """What is known of one partition, in one generation."""

    generation: int
    baselines: Baselines
    book: GroupBook[Any] = field(default_factory=GroupBook)
    next_offset: int = 0
    """Offset after the last record taken."""


class Advantage:
    """Closes groups and sends their members' fates."""

    def __init__(
        self, config: Config, topics: Topics, outbox: Outbox, app: faust.App, follower: VersionFollower
    ) -> None:
        self._config, self._topics, self._outbox, self._app = config, topics, outbox, app
        self._rule = FateRule.of(config.advantage, config.staleness)
        self._topic = topics.name(SCORES)
        self._span_ms = int(config.rollout.group_seconds * 1000) + REMEMBER_MS + config.feedback.extension_ms
        self._versions: VersionBook = follower.book
        self._follower = follower
        self._dead_letters = DeadLetters(outbox, topics, STAGE)
        self._partitions: dict[int, PartitionState] = {}
        self._policies: set[str] = set()
        self._sending: set[asyncio.Task[None]] = set()
        self._undelivered: Counter[str] = Counter()
        """group_id -> sendings whose delivery is not confirmed yet."""
        self._repeats: dict[str, list[Any]] = {}
        """group_id -> events of repeats that wait for that confirmation."""
        self.preparing = False
        """True while a partition's past is read, which holds up the others."""

    async def run(self, stream: Any) -> None:
        """The agent: every event of `stream`."""
        try:
            async for event in stream.noack().events():
                await self.take(event)
        except Exception as e:
            self._outbox.fail(e)
            raise

    def taken(self) -> dict[int, int]:
        """Per partition of this generation, the offset after the last record taken. Any thread."""
        now = self._app.consumer_generation_id
        return {p: s.next_offset for p, s in list(self._partitions.items()) if s.generation == now}

    async def take(self, event: Any) -> None:
        """Put one score into its group, and send the groups that it closed."""
        state = await self._state_of(event.message)
        if state is None:
            return
        state.next_offset = max(state.next_offset, event.message.offset + 1)
        try:
            score = SCORE.decode(event.value, headers_of(event.message))
            await self._meet(score.policy_id)
        except InvalidMessageError as e:
            sent = await self._dead_letters.send(event.message, e)
            self._outbox.after([sent], lambda: _finish([event]))
            return
        if state.generation != self._app.consumer_generation_id:
            return
        at_ms = int(event.message.timestamp * 1000)
        verdict, closed = state.book.add(score, offset=event.message.offset, at_ms=at_ms, handle=event)
        if verdict is Verdict.MEMBER:
            state.baselines.open(score.group_id, score.policy_id)
        state.baselines.observe(score, event.message.offset)
        for group in closed:
            self._send(group, state)
        if verdict is Verdict.LATE:
            await self._send_late(score, event)
        elif verdict is Verdict.DUPLICATE:
            self._acknowledge_repeat(score.group_id, event)

    async def tick(self, now_ms: int) -> None:
        """Close by the clock what is overdue in partitions that have been read to their end."""
        if self._app.rebalancing:
            return
        for partition, state in list(self._partitions.items()):
            if state.generation != self._app.consumer_generation_id:
                del self._partitions[partition]
            elif state.book.nearest_deadline_ms + CLOCK_GRACE_MS < now_ms:
                await self._close_by_clock(partition, state, now_ms)
        self._count_open()

    async def _close_by_clock(self, partition: int, state: PartitionState, now_ms: int) -> None:
        tp = TP(self._topic, partition)
        # The end is asked of the broker now: a worker that was frozen wakes with an old one.
        end = (await self._app.consumer.highwaters(tp)).get(tp)
        at = self._app.consumer.past_holes(tp, state.next_offset)
        if end is None or at < end or state.generation != self._app.consumer_generation_id:
            return
        for group in state.book.close_by_clock(now_ms):
            self._send(group, state)

    async def _state_of(self, message: Any) -> PartitionState | None:
        """The partition's state, built where it is new; None for a message of another generation."""
        generation = message.generation_id
        if generation != self._app.consumer_generation_id:
            return None
        state = self._partitions.get(message.partition)
        if state is not None and state.generation == generation:
            return state
        state = PartitionState(generation, Baselines(self._rule.window))
        self.preparing = True
        try:
            count = await asyncio.to_thread(self._look_back, message, state) if message.offset else 0
        finally:
            self.preparing = False
        if generation != self._app.consumer_generation_id:
            return None
        logger.info(
            "partition=%d starts at offset=%d, %d scores recalled", message.partition, message.offset, count
        )
        self._partitions[message.partition] = state
        return state

    def _look_back(self, message: Any, state: PartitionState) -> int:
        """Fill a new `state` with what lies before `message`; how many scores were recalled."""
        at = (self._config.kafka, self._topic, message.partition, message.offset)
        count = recall_before(
            *at, at_ms=int(message.timestamp * 1000), span_ms=self._span_ms, recall=state.book.recall
        )
        if self._rule.window:
            offsets = self._rule.window * RECALL_FACTOR
            observe_before(*at, offsets=offsets, observe=state.baselines.observe)
        return count

    async def _meet(self, policy_id: str) -> None:
        """Make sure that a policy's topics exist and its versions are followed."""
        if policy_id in self._policies:
            return
        try:
            checked_name(policy_id, what="policy_id")
        except ConfigError as e:
            raise InvalidMessageError("policy_id", str(e)) from None
        await asyncio.to_thread(create_topics, self._config.kafka, self._topics, [policy_id])
        await asyncio.to_thread(self._follower.follow, policy_id)
        self._policies.add(policy_id)

    def _send(self, group: ClosedGroup[Any], state: PartitionState) -> None:
        self._undelivered[group.group_id] += 1
        metrics.groups_closed.labels(cause=group.cause.value).inc()
        history = state.baselines.close(group.group_id)
        samples = fates_of(group, self._rule, self._versions.current, int(time.time() * 1000), history)
        for entry in group.entries:
            observe_lag(entry.score, self._versions.current(entry.score.policy_id))
        events = [entry.handle for entry in group.entries]
        task = asyncio.get_running_loop().create_task(self._deliver(group.group_id, samples, events))
        self._sending.add(task)
        task.add_done_callback(self._delivery_started)

    async def _send_late(self, score: Score, event: Any) -> None:
        self._undelivered[score.group_id] += 1
        await self._deliver(score.group_id, [late_fate(score, int(time.time() * 1000))], [event])

    async def _deliver(self, group_id: str, samples: list[Sample], events: list[Any]) -> None:
        """Send `samples` and acknowledge `events` when all of them are delivered."""
        sent = []
        for sample, event in zip(samples, events, strict=True):
            _count(sample)
            sent.append(
                await self._outbox.send(
                    self._topics.name(SAMPLES, sample.policy_id),
                    sample.group_id.encode(),
                    SAMPLE.encode(sample),
                    [*sample_headers(sample), *_trace_of(event)],
                )
            )
        self._outbox.after(sent, lambda: self._delivered(group_id, events))

    def _delivered(self, group_id: str, events: list[Any]) -> None:
        _finish(events)
        self._undelivered[group_id] -= 1
        if not self._undelivered[group_id]:
            del self._undelivered[group_id]
            for event in self._repeats.pop(group_id, ()):
                event.ack()

    def _acknowledge_repeat(self, group_id: str, event: Any) -> None:
        if group_id in self._undelivered:
            self._repeats.setdefault(group_id, []).append(event)
        else:
            event.ack()

    def _delivery_started(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._outbox.fail(error)

    def _count_open(self) -> None:
        metrics.groups_open.set(sum(len(s.book) for s in self._partitions.values()))


def _finish(events: list[Any]) -> None:
    _RECORDS.inc(len(events))
    for event in events:
        event.ack()


def _count(sample: Sample) -> None:
    if sample.fate is Fate.ADMITTED:
        metrics.samples_admitted.inc()
    else:
        metrics.samples_dropped.labels(reason=sample.reason).inc()


def _trace_of(event: Any) -> Headers:
    return [(k, v) for k, v in headers_of(event.message) if k == TRACE_HEADER]
