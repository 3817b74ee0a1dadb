"""One gateway: requests become turns of rollouts, sampled by engines, and finished rollouts are handed on.

    request -> caller, rollout -> plan (capture) -> turn (sampler) -> commit -> answer -> delivered

Everything here runs on one event loop; only `publish` waits for the disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...schemas.trajectory import Trajectory
from . import capture
from .answer import Head, Usage
from .capture import Outcome, Plan, Session, SessionFinishedError
from .dialects import Dialect
from .errors import RequestError, busy
from .keys import Caller
from .limits import Limits, check_size, engine_request, turn_tokens
from .lineage import lineage_of, session_hint
from .listening import Listener
from .messages import Call
from .raw import RawSession
from .renderer import Renderer, RenderError
from .rollouts import OpenRollout, Rollouts
from .sampler import Sampler
from .spelling import Marks, Vocabulary
from .turn import Turn

logger = logging.getLogger(__name__)

Publish = Callable[[list[Trajectory]], Awaitable[None]]
"""Returns when the trajectories cannot be lost any more; RequestError 503 where that is not possible now."""


class Model(Renderer, Vocabulary, Protocol):
    """Renders, and spells what was sampled."""

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a reasoning block."""

    def text_ids(self, text: str) -> list[int]:
        """A raw prompt; control tokens in it are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the HTTP side knows of a request."""

    dialect: Dialect
    call: Call
    caller: Caller
    headers: Mapping[str, str]
    session: str | None
    """Named by the URL."""
    digest: bytes
    """Of the body."""


@dataclass(slots=True, kw_only=True)
class Served:
    """A turn on its way to one client."""

    turn: Turn
    head: Head
    rollout: OpenRollout | None = None
    plan: Plan | None = None

    def headers(self) -> dict[str, str]:
        """Response headers."""
        return {} if self.rollout is None else {"x-headrace-rollout": self.rollout.id}

    def delivered(self) -> None:
        """The last byte has been written."""
        if self.rollout is not None and self.plan is not None:
            self.rollout.session.delivered(self.plan.first or self.plan)


class Gateway:
    """All of it but HTTP."""

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        rollouts: Rollouts,
        publish: Publish,
        *,
        limits: Limits,
        temperature: float | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        group_ms: int = 120_000,
    ) -> None:
        """`temperature`: sampled at, whatever clients ask; `group_ms`: how long a score may take after the end."""
        self.model, self.sampler, self.rollouts, self.limits = model, sampler, rollouts, limits
        self._publish, self._temperature = publish, temperature
        self._now_ms, self._group_ms = now_ms, group_ms
        self._marks = Marks(model)
        self._turns: dict[str, Turn] = {}
        self._numbers = itertools.count()
        self.in_flight = 0
        """Requests being served."""

    def count_tokens(self, call: Call) -> int:
        """Tokens of a conversation's prompt. RequestError."""
        check_size(call, self.limits)
        return len(self._open(call))

    async def begin(self, request: Request) -> Served:
        """The turn that answers a request. `end` must follow. RequestError, before anything is sampled."""
        if self.in_flight >= self.limits.in_flight:
            raise busy(f"{self.in_flight} requests are being served, gateway.max_in_flight is the limit")
        call = request.call
        check_size(call, self.limits)
        if self._temperature is not None:
            sampling = dataclasses.replace(call.sampling, temperature=self._temperature)
            call = dataclasses.replace(call, sampling=sampling)
        captured = request.caller.capture and request.headers.get("x-headrace-capture", "").lower() != "off"
        if not captured:
            served = self._uncaptured(request, call)
        else:
            served = await self._captured(request, call)
        self.in_flight += 1
        return served

    def end(self, served: Served) -> None:
        """The client has gone, or has its answer."""
        self.in_flight -= 1
        if served.rollout is not None:
            served.rollout.requests -= 1
            self.rollouts.touch(served.rollout)
            self.rollouts.drop_if_empty(served.rollout)

    async def finish(self, rollout: OpenRollout) -> list[Trajectory]:
        """End a rollout; returns when its trajectories are safe. RequestError 503: ask again."""
        if rollout.trajectories is None:
            shared = rollout.session.rollout
            deadline = self._now_ms() + self._group_ms
            rollout.session.rollout = dataclasses.replace(shared, group_deadline_ms=deadline)
            stamps = (("gateway_end", self._now_ms()),)
            found = self.rollouts.finish(rollout)
            rollout.trajectories = [dataclasses.replace(t, stamps=(*rollout.stamps, *stamps)) for t in found]
        await self._publish(rollout.trajectories)
        self.rollouts.forget(rollout)
        return rollout.trajectories

    def _open(self, call: Call) -> tuple[int, ...]:
        try:
            if call.prompt is None:
                return tuple(self.model.open(call.messages, call.tools))
            ids = call.prompt if isinstance(call.prompt, tuple) else tuple(self.model.text_ids(call.prompt))
        except RenderError as e:
            raise RequestError(str(e)) from None
        if max(ids) >= self.model.vocab_size:
            raise RequestError(
                f"prompt: token id {max(ids)} is not below {self.model.vocab_size}", param="prompt"
            )
        return ids

    def _uncaptured(self, request: Request, call: Call) -> Served:
        prompt = self._open(call)
        turn, head = self._turn(request, call, prompt, uuid.uuid4().hex, ended=lambda _: None)
        turn.start(self.sampler, None)
        return Served(turn=turn, head=head)

    async def _captured(self, request: Request, call: Call) -> Served:
        retry = request.headers.get("x-stainless-retry-count", "0")
        again = retry.isdigit() and int(retry) > 0
        idempotency_key = request.headers.get("idempotency-key")
        name = request.session or request.caller.session or session_hint(request.headers)
        rollout = self.rollouts.of_request(
            request.caller.tenant, name, call, request.digest, again=again or idempotency_key is not None
        )
        try:
            plan = self._plan(
                rollout.session,
                call,
                lineage=lineage_of(request.headers),
                idempotency_key=idempotency_key,
                retry=int(again),
                body_digest=request.digest,
            )
        except RequestError:
            self.rollouts.drop_if_empty(rollout)
            raise
        except RenderError as e:
            self.rollouts.drop_if_empty(rollout)
            raise RequestError(str(e)) from None
        except SessionFinishedError:
            raise busy("this rollout has just been finished; send the request again") from None
        try:
            served = self._served(request, call, rollout, plan)
        except RequestError:
            rollout.session.abandon(plan)
            self.rollouts.drop_if_empty(rollout)
            raise
        rollout.requests += 1
        return served

    def _plan(self, session: Session, call: Call, **settings: Any) -> Plan:
        if not isinstance(session, RawSession):
            return session.begin(call, **settings)
        prompt = self._open(call)
        text = call.prompt if isinstance(call.prompt, str) else self.model.decode(prompt)
        return session.begin_raw(prompt, text, call, **settings)

    def _served(self, request: Request, call: Call, rollout: OpenRollout, plan: Plan) -> Served:
        if plan.outcome is Outcome.GENERATE:
            turn, head = self._turn(
                request, call, plan.prompt_ids, plan.id, ended=lambda t: self._commit(t, head, rollout, plan)
            )
            self._turns[plan.id] = turn
            turn.start(self.sampler, None if plan.parent is None else plan.parent.engine_id)
            return Served(turn=turn, head=head, rollout=rollout, plan=plan)
        first = plan.first
        assert first is not None
        if plan.outcome is Outcome.JOIN:
            turn = self._turns[first.id]
            prompt_tokens = turn.prompt_tokens
        else:
            nodes = plan.turns
            prompt_tokens = nodes[0].prompt_tokens
            completion = sum(len(n.sampled) for n in nodes)
            turn = Turn.replayed(
                [(n.answer, n.finish_reason) for n in nodes],
                Usage(prompt=prompt_tokens, completion=completion),
            )
        head = self._head(call, first.id, prompt_tokens)
        return Served(turn=turn, head=head, rollout=rollout, plan=plan)

    def _turn(
        self,
        request: Request,
        call: Call,
        prompt: tuple[int, ...],
        turn_id: str,
        *,
        ended: Callable[[Turn], None],
    ) -> tuple[Turn, Head]:
        most = turn_tokens(call.sampling, len(prompt), self.limits)
        reasoning = self.model.opens_reasoning(prompt)
        new_id = lambda: f"{request.dialect.call_id}{uuid.uuid4().hex[:24]}"  # noqa: E731
        requests, listeners = [], []
        for i in range(call.sampling.n):
            name = f"{turn_id}-{i}"
            requests.append(engine_request(name, prompt, call.sampling, most, self.model.stop_ids))
            listeners.append(
                Listener(self.model, self._marks, call, index=i, new_id=new_id, reasoning=reasoning)
            )
        head = self._head(call, turn_id, len(prompt))
        if call.echo:
            head = dataclasses.replace(head, echoed=self.model.decode(prompt))
        return Turn(requests, listeners, ended=ended), head

    def _head(self, call: Call, turn_id: str, prompt_tokens: int) -> Head:
        handles = tuple(f"{turn_id}-{i}" for i in range(call.sampling.n))
        return Head(
            id=turn_id,
            created=self._now_ms() // 1000,
            call=call,
            prompt_tokens=prompt_tokens,
            handles=handles,
        )

    def _commit(self, turn: Turn, head: Head, rollout: OpenRollout, plan: Plan) -> None:
        """What was sampled becomes part of the rollout, undelivered as yet."""
        self._turns.pop(plan.id, None)
        session = rollout.session
        sampled = [
            capture.Sampled(result=s.result(), answer=answer.message(head.handle(i)), engine_id=s.engine_id)
            for i, (s, answer) in enumerate(zip(turn.sampled, turn.answers, strict=True))
            if s.token_ids
        ]
        if turn.error is not None or not sampled:
            session.abandon(plan)
            return
        try:
            nodes = session.commit(plan, sampled, delivered=False)
        except SessionFinishedError:
            logger.info("a turn came after its rollout had ended rollout=%s", rollout.id)
            return
        self.rollouts.answered(rollout, nodes)


def body_digest(path: str, body: bytes) -> bytes:
    """By which two requests are the same one."""
    return hashlib.blake2b(body, digest_size=16, person=path.encode()[-16:]).digest()


def make_sessions(
    renderer: Renderer, policy_id: str, **settings: Any
) -> Callable[[str, str | None, bool], Session]:
    """How Rollouts makes a session; `settings`: thinking, on_branch."""

    def make(rollout_id: str, name: str | None, raw: bool) -> Session:
        rollout = capture.Rollout(rollout_id=rollout_id, policy_id=policy_id, session_id=name)
        return (RawSession if raw else Session)(rollout, renderer, **settings)

    return make
