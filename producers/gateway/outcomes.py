"""What becomes of rollouts: their end, and outcomes that come with it or days later."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from ...schemas.errors import InvalidMessageError
from ...schemas.feedback import Feedback, check_feedback
from .errors import RequestError
from .gateway import Gateway
from .reading import Fields
from .rollouts import OpenRollout

Send = Callable[[Feedback], Awaitable[None]]
"""Returns when Kafka has it; RequestError 503 where it has not."""

REMEMBERED = 1 << 16
"""Finished rollouts whose `finish` is answered again."""


class Outcomes:
    """Ends rollouts and sends feedback."""

    def __init__(
        self,
        gateway: Gateway,
        send: Send,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        kept: Callable[[str], int] = lambda rollout_id: 0,
    ) -> None:
        """`kept`: how many trajectories of a rollout wait in the spool."""
        self._gateway, self._send, self._now_ms, self._kept = gateway, send, now_ms, kept
        self._finished: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    async def send(self, rollout_id: str, body: Fields, key: str | None) -> Feedback:
        """`body`: {value, name, key, event_ms, metadata}. RequestError. Equal keys are one event."""
        value = body.raw("value") if body.has("value") else body.raw("reward")
        if isinstance(value, bool):
            value = float(value)
        if type(value) not in (int, float):
            raise body.refuse("value", "must be a number, or true or false")
        key = body.text("key", None) or key or uuid.uuid4().hex
        metadata = body.raw("metadata")
        feedback = Feedback(
            # One client's keys say nothing about another rollout's.
            feedback_id=f"{rollout_id}:{body.text('name', 'reward')}:{key}",
            rollout_id=rollout_id,
            name=body.text("name", "reward"),
            value=_float(value, body),
            event_ms=body.whole("event_ms", self._now_ms(), low=0, high=1 << 52),
            metadata=None if metadata is None else json.dumps(metadata),
        )
        try:
            check_feedback(feedback)
        except InvalidMessageError as e:
            raise RequestError(str(e)) from None
        await self._send(feedback)
        return feedback

    async def finish(self, rollout_id: str, tenant: str) -> dict[str, Any]:
        """End a rollout; the same answer again for one that has ended. RequestError 404, 503."""
        known = self._finished.get(rollout_id)
        if known is not None and known[0] == tenant:
            return known[1]
        rollout = self._gateway.rollouts.get(rollout_id, tenant)
        if rollout is None:
            if count := self._kept(rollout_id):
                return _finished(rollout_id, count)
            raise RequestError(f"no rollout {rollout_id[:100]!r} is open here", status=404)
        return await self.end(rollout)

    async def end(self, rollout: OpenRollout) -> dict[str, Any]:
        """End an open rollout. RequestError 503: its trajectories are not safe yet."""
        answer = _finished(rollout.id, len(await self._gateway.finish(rollout)))
        self._finished[rollout.id] = rollout.tenant, answer
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        return answer


def _finished(rollout_id: str, count: int) -> dict[str, Any]:
    return {"rollout_id": rollout_id, "status": "finished", "trajectories": count}


def _float(value: Any, body: Fields) -> float:
    try:
        return float(value)
    except OverflowError:
        raise body.refuse("value", "is too large") from None
