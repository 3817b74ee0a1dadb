"""The rollouts in flight: one asyncio task each, held until its record is handed over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from ...schemas.trajectory import Trajectory
from ..environments.base import Environment
from .episode import Episode, Generate, Group
from .tokenizing import PolicyTokenizer

logger = logging.getLogger(__name__)

Rollout = asyncio.Task[None]


class Crew:
    """Starts rollouts, and sees that each one ends with a record, whatever ends it."""

    def __init__(
        self,
        *,
        tokenizer: PolicyTokenizer,
        generate: Generate,
        publish: Callable[[Trajectory], Awaitable[None]],
        failed: Callable[[BaseException], None],
        now_ms: Callable[[], int],
    ) -> None:
        """`failed` is told of a record that could not be handed over."""
        self._tokenizer, self._generate = tokenizer, generate
        self._publish, self._failed, self._now_ms = publish, failed, now_ms
        self._episodes: dict[Rollout, Episode] = {}

    def start(self, group: Group, environment: Callable[[], Environment], *, seconds: float) -> None:
        """Start all rollouts of `group`; those that run for `seconds` are aborted with reason `deadline`."""
        rollouts = [self._start(group, group.rollout_id(i), environment) for i in range(group.size)]
        asyncio.get_running_loop().call_later(seconds, self.abort, rollouts, "deadline")

    def abort(self, rollouts: Collection[Rollout], reason: str) -> None:
        """Cut these short; each leaves a record that says why."""
        for rollout in rollouts:
            episode = self._episodes.get(rollout)
            if episode is not None:
                episode.abort(reason, rollout)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Let rollouts finish for `seconds`, or until `hurry` is set; then abort the rest."""
        hurried = asyncio.create_task(hurry.wait())
        deadline = time.monotonic() + seconds
        while self._episodes and not hurried.done() and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait({*self._episodes, hurried}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        rest = list(self._episodes)
        if rest:
            logger.info("rollouts aborted at shutdown count=%d", len(rest))
            self.abort(rest, "shutdown")
            await asyncio.wait(rest, timeout=seconds)

    async def close(self) -> None:
        """End what is left without a record."""
        rest = list(self._episodes)
        for rollout in rest:
            rollout.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _start(self, group: Group, rollout_id: str, environment: Callable[[], Environment]) -> Rollout:
        episode = Episode(
            group,
            rollout_id,
            environment=environment,
            tokenizer=self._tokenizer,
            generate=self._generate,
            now_ms=self._now_ms,
        )

        async def roll() -> None:
            await self._publish(await episode.run())

        rollout = asyncio.create_task(roll())
        self._episodes[rollout] = episode
        rollout.add_done_callback(self._ended)
        return rollout

    def _ended(self, rollout: Rollout) -> None:
        del self._episodes[rollout]
        error = None if rollout.cancelled() else rollout.exception()
        if error is not None:
            self._failed(error)
