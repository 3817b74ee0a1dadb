"""The verify stage: trajectories -> scores, one for one; what cannot be read becomes a dead letter.

An event is acknowledged when its score (or dead letter) is delivered, whatever the order: the safe consumer
commits an offset only once everything before it is done. Built-in rewards run inline, one record after the
other; a user's own run beside the stream, a bounded number at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..schemas.codec import TRACE_HEADER, Headers, header, version_headers
from ..schemas.config import Config
from ..schemas.errors import BlobError, InvalidMessageError, RewardError
from ..schemas.score import SCORE, Ref, Score, ScoreStatus
from ..schemas.topics import SCORES, Topics
from ..schemas.trajectory import TRAJECTORY, Trajectory
from . import metrics
from .blobs import BlobStore
from .claims import CLAIM_HEADER, check_out
from .deadletters import DeadLetters, headers_of
from .outbox import Outbox
from .rewards.base import RewardResult, RolloutView, view_of
from .rewards.composed import combined
from .rewards.load import LoadedReward
from .rewards.pool import host_pool
from .rewards.runner import RewardRunner
from .verdicts import Outcome, RewardBook, check_deadline, outcome_of, score_of, void_of

if TYPE_CHECKING:
    from .feedback import FeedbackJoin

logger = logging.getLogger(__name__)

STAGE = "verify"

TRAJECTORY_HEADER = "trajectory"
"""Of a score record: its trajectory_id, so that a reader who only counts need not decode."""
DEADLINE_HEADER = "group-deadline-ms"
STORE_TRIES = 5
HOST_START_S = 30.0

_RECORDS = metrics.stage_records.labels(stage=STAGE)


class Verify:
    """Scores the records of `trajectories`."""

    def __init__(
        self,
        config: Config,
        topics: Topics,
        outbox: Outbox,
        store: BlobStore,
        *,
        join: FeedbackJoin | None = None,
    ) -> None:
        """With `join`, scores wait there for outcomes. Raises ConfigError when the configured reward cannot be loaded."""
        self._join = join
        self._unasked = join is not None and config.feedback.reward_weight == 0
        """The reward is what outcomes say alone."""
        self._rewards = RewardBook(config.verify)
        self._runner = RewardRunner(
            concurrency=config.verify.concurrency, timeout_s=config.verify.timeout_seconds
        )
        self._hosts = host_pool(config.verify) if config.verify.isolation == "process" else None
        self._timeout_s = config.verify.timeout_seconds
        self._failure_reward = config.verify.failure_reward
        self._topic = topics.name(SCORES)
        self._outbox, self._store = outbox, store
        self._dead_letters = DeadLetters(outbox, topics, STAGE)
        self._beside: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(2 * config.verify.concurrency)
        """Bounds the records that wait beside the stream."""

    @property
    def running(self) -> int:
        """Calls of a user's own rewards in progress."""
        return self._runner.running + (self._hosts.running if self._hosts is not None else 0)

    @property
    def slow_seconds(self) -> float:
        """How long a record may take at this moment: a call, and again alone in a process that first must start."""
        if not self.running:
            return 0.0
        return 2 * max(self._timeout_s, self._runner.longest_s) + HOST_START_S

    async def run(self, stream: Any) -> None:
        """The agent: every event of `stream`."""
        try:
            async for event in stream.noack().events():
                await self.take(event)
        except Exception as e:
            self._outbox.fail(e)
            raise

    def close(self) -> None:
        """End idle reward threads, and the processes of reward functions."""
        self._runner.close()
        if self._hosts is not None:
            self._hosts.close()

    async def take(self, event: Any) -> None:
        """Deal with one record at once, or beside the stream where that takes time."""
        headers = headers_of(event.message)
        if header(headers, CLAIM_HEADER) is not None:
            await self._start_beside(event, None, headers)
            return
        try:
            trajectory = self._decode(event, event.value, headers)
        except InvalidMessageError as e:
            await self._reject(event, e)
            return
        outcome = self._quick_outcome(trajectory)
        if outcome is None:
            await self._start_beside(event, trajectory, headers)
        else:
            await self._publish(event, trajectory, outcome, headers)

    def _decode(self, event: Any, value: bytes | None, headers: Headers) -> Trajectory:
        trajectory = TRAJECTORY.decode(value, headers)
        check_deadline(trajectory, int(event.message.timestamp * 1000))
        return trajectory

    def _quick_outcome(self, trajectory: Trajectory) -> Outcome | None:
        """The outcome where it takes no time; None where a user's own function must be asked."""
        void = void_of(trajectory)
        if void is not None:
            return void
        if self._unasked:
            return Outcome(ScoreStatus.SCORED, 0.0)
        try:
            reward, args = self._rewards.find(trajectory)
            if not reward.inline:
                return None
            return outcome_of(
                self._runner.run_inline(reward, view_of(trajectory, args)),
                self._failure_reward,
            )
        except RewardError as e:
            return _void(trajectory, e)

    async def _start_beside(self, event: Any, trajectory: Trajectory | None, headers: Headers) -> None:
        await self._room.acquire()
        task = asyncio.get_running_loop().create_task(self._work_beside(event, trajectory, headers))
        self._beside.add(task)
        task.add_done_callback(self._beside_done)

    def _beside_done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        self._room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._outbox.fail(error)

    async def _work_beside(self, event: Any, trajectory: Trajectory | None, headers: Headers) -> None:
        try:
            if trajectory is None:
                value = await self._fetch(event.value, headers)
                trajectory = self._decode(event, value, headers)
        except InvalidMessageError as e:
            await self._reject(event, e)
            return
        outcome = self._quick_outcome(trajectory) or await self._slow_outcome(trajectory)
        await self._publish(event, trajectory, outcome, headers)

    async def _slow_outcome(self, trajectory: Trajectory) -> Outcome:
        try:
            reward, args = self._rewards.find(trajectory)
            result = await self._ask(reward, view_of(trajectory, args))
            return outcome_of(result, self._failure_reward, len(trajectory.turns))
        except RewardError as e:
            return _void(trajectory, e)

    async def _ask(self, reward: LoadedReward, view: RolloutView) -> RewardResult:
        """What the reward says, from wherever it runs. Raises RewardError."""
        if reward.parts:
            views = (replace(view, args=part.args) for part in reward.parts)
            asked = [self._ask(part.reward, v) for part, v in zip(reward.parts, views, strict=True)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            named = [(part.name, part.weight) for part in reward.parts]
            return combined(named, found, self._failure_reward)
        if reward.inline:
            return self._runner.run_inline(reward, view)
        runner = self._runner if self._hosts is None or reward.ours else self._hosts
        return await runner.run(reward, view)

    async def _fetch(self, value: bytes | None, headers: Headers) -> bytes | None:
        """The claimed payload; a store that fails is asked again, then ends the worker."""
        for tries_left in reversed(range(STORE_TRIES)):
            try:
                return await asyncio.to_thread(check_out, value, headers, store=self._store)
            except BlobError as e:
                if not tries_left:
                    raise
                logger.warning("the object store failed, trying again: %s", e)
                await asyncio.sleep(0.2 * 2 ** (STORE_TRIES - tries_left))
        raise AssertionError("unreachable")

    async def _publish(self, event: Any, trajectory: Trajectory, outcome: Outcome, headers: Headers) -> None:
        message = event.message
        score = score_of(trajectory, outcome, Ref(message.partition, message.offset), int(time.time() * 1000))
        if self._join is not None:
            score = self._join.extended(score)
        try:
            value = SCORE.encode(score)
        except InvalidMessageError as e:
            await self._reject(event, e)
            return
        if self._join is not None and score.status is not ScoreStatus.VOID:
            kept = await self._join.keep(event, score, headers)
            if kept is not None:
                self._done_after(event, kept)
            return
        metrics.count_score(score.status.value, score.reason)
        sent = await self._outbox.send(
            self._topic, score.group_id.encode(), value, score_headers(score, headers)
        )
        self._done_after(event, sent)

    async def _reject(self, event: Any, error: InvalidMessageError) -> None:
        self._done_after(event, await self._dead_letters.send(event.message, error))

    def _done_after(self, event: Any, delivery: asyncio.Future[Any]) -> None:
        def done() -> None:
            _RECORDS.inc()
            event.ack()

        self._outbox.after([delivery], done)


def score_headers(score: Score, original: Headers) -> Headers:
    """The record headers of a score; the trace context of its trajectory is passed on untouched."""
    return [
        *version_headers(SCORE.tag, score.policy_id, score.version_min, score.version_max),
        (TRAJECTORY_HEADER, score.trajectory_id.encode()),
        (DEADLINE_HEADER, str(score.group_deadline_ms).encode()),
        *((k, v) for k, v in original if k == TRACE_HEADER),
    ]


def _void(trajectory: Trajectory, error: RewardError) -> Outcome:
    logger.warning("void: rollout=%s reason=%s %s", trajectory.rollout_id, error.reason, error.detail[:200])
    return Outcome.void(error.reason)
