"""One rollout: engine calls and environment steps in turn, recorded token-exactly as one Trajectory.

However it ends there is a record: `completed` when the episode came to its end (the policy's, the
environment's, or a limit), `aborted` with a reason when the infrastructure did (engine, environment, template,
deadline, shutdown). An aborted one keeps what was sampled until then.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import EngineError
from ...schemas.task import Task
from ...schemas.trajectory import Sampling, Trajectory, TrajectoryStatus
from ..engines.protocol import GenerateRequest, GenerateResult
from ..environments.base import Environment
from ..environments.calls import EnvironmentCalls, EnvironmentTimeout
from .tokenizing import Message, PolicyTokenizer, TokenizingError
from .transcript import Transcript

logger = logging.getLogger(__name__)

Generate = Callable[[GenerateRequest, str | None], Awaitable[tuple[str, GenerateResult]]]
"""(request, engine that served the last turn) -> (engine_id, result). Raises EngineError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the rollouts of one group share."""

    group_id: str
    task: Task
    size: int
    deadline_ms: int
    """Unix milliseconds of the broker's clock."""
    prompt: str | list[Message]
    """The task's raw prompt, or its messages."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    max_turns: int
    max_total_tokens: int
    environment_seconds: float = 60.0
    """Limit of one call of the environment."""

    def rollout_id(self, index: int) -> str:
        """Id of the group's rollout `index`."""
        return f"{self.group_id}.{index}"


class Episode:
    """One attempt at a group's task. `run` may be called once."""

    def __init__(
        self,
        group: Group,
        rollout_id: str,
        *,
        environment: Callable[[], Environment],
        tokenizer: PolicyTokenizer,
        generate: Generate,
        now_ms: Callable[[], int],
    ) -> None:
        self.group = group
        self.rollout_id = rollout_id
        self.running = False
        """True while `run` may be cancelled."""
        self._abort_reason: str | None = None
        self._environment = EnvironmentCalls(environment, seconds=group.environment_seconds)
        self._tokenizer = tokenizer
        self._generate = generate
        self._now_ms = now_ms
        self._started_ms = now_ms()
        self._engine_id: str | None = None
        self._transcript = Transcript(tokenizer, group.prompt_ids, group.prompt)

    def abort(self, reason: str, rollout: asyncio.Task[Any]) -> None:
        """Cut `run` short, which `rollout` awaits or is about to; its record gives the reason."""
        if self._abort_reason is None:
            self._abort_reason = reason
            if self.running:  # a task that has not begun would end without a record
                rollout.cancel()

    async def run(self) -> Trajectory:
        """The record of this rollout. Only a cancellation that `abort` did not ask for gets out."""
        if self._abort_reason is not None:
            return self._aborted(self._abort_reason)
        self.running = True
        try:
            await self._environment.build()
            return await self._play()
        except EngineError as e:
            return self._aborted("engine", e)
        except TokenizingError as e:
            return self._aborted(e.reason, e)
        except asyncio.CancelledError:
            if self._abort_reason is None:
                raise
            return self._aborted(self._abort_reason)
        except EnvironmentTimeout as e:
            logger.warning("environment too slow rollout=%s: %s", self.rollout_id, e)
            return self._aborted("environment_timeout", e)
        except Exception as e:  # the environment is the user's code
            logger.warning("environment failed rollout=%s", self.rollout_id, exc_info=True)
            return self._aborted("environment", e)
        finally:
            self.running = False
            await self._environment.close()

    async def _play(self) -> Trajectory:
        group, transcript, environment = self.group, self._transcript, self._environment
        observation = await environment.start(group.task)
        if observation is not None and not transcript.observe(observation, limit=group.max_total_tokens):
            return self._aborted("prompt_too_long")
        if len(transcript.ids) >= group.max_total_tokens:
            return self._aborted("prompt_too_long")
        while True:
            result = await self._sample()
            text = transcript.add_turn(result)
            if result.finish_reason == "abort":
                return self._aborted("engine_abort")
            observation = await environment.step(text, result.token_ids)
            if observation is None:
                return self._record(
                    TrajectoryStatus.COMPLETED, environment.stop_reason or result.finish_reason
                )
            if len(transcript.turns) >= group.max_turns:
                return self._record(TrajectoryStatus.COMPLETED, "max_turns")
            if not transcript.observe(observation, limit=group.max_total_tokens):
                return self._record(TrajectoryStatus.COMPLETED, "length")

    async def _sample(self) -> GenerateResult:
        sampling, transcript = self.group.sampling, self._transcript
        request = GenerateRequest(
            request_id=f"{self.rollout_id}.{len(transcript.turns)}",
            token_ids=tuple(transcript.ids),
            max_tokens=min(sampling.max_tokens, self.group.max_total_tokens - len(transcript.ids)),
            stop_token_ids=self.group.stop_token_ids,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        self._engine_id, result = await self._generate(request, self._engine_id)
        return result

    def _aborted(self, reason: str, error: Exception | None = None) -> Trajectory:
        detail = f"{type(error).__name__}: {str(error)[:300]}" if error is not None else None
        return self._record(TrajectoryStatus.ABORTED, "abort", reason, detail)

    def _record(
        self, status: TrajectoryStatus, stop_reason: str, reason: str | None = None, detail: str | None = None
    ) -> Trajectory:
        group, task = self.group, self.group.task
        return Trajectory(
            trajectory_id=f"{self.rollout_id}-0",
            rollout_id=self.rollout_id,
            group_id=group.group_id,
            group_size=group.size,
            group_deadline_ms=group.deadline_ms,
            task_id=task.task_id,
            policy_id=task.policy_id,
            engine_id=self._engine_id or "",
            split=task.split,
            status=status,
            reason=reason,
            **self._transcript.columns(),
            sampling=group.sampling,
            stop_reason=stop_reason,
            vocab_size=self._tokenizer.vocab_size,
            reward_spec=task.reward_spec,
            messages=json.dumps(self._transcript.messages, ensure_ascii=False),
            stamps=(("rollout_start", self._started_ms), ("rollout_end", self._now_ms())),
            metadata=json.dumps({"detail": detail}) if detail is not None else task.metadata,
        )
