"""One rollout as the gateway sees it: requests in, prompt ids out, sampled turns in, trajectories out.

    session = Session(rollout, ChatMLRenderer(tokenizer))
    plan = session.begin(call, lineage=lineage_of(headers), body_digest=digest)
    if plan.outcome is Outcome.GENERATE:              # JOIN: await what plan.first does; REPLAY: serve plan.turns
        result = await engine.generate(GenerateRequest(token_ids=plan.prompt_ids, ...))   # failed: abandon(plan)
        turns = session.commit(plan, [Sampled(result=result, answer=message)], delivered=False)
        ...                                           # the last byte is written:
        session.delivered(plan)
    trajectories = session.finish()

Nothing here waits: every method runs to its end on the event loop, so no two requests see a half-made tree.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from ...schemas.errors import HeadraceError
from ...schemas.trajectory import Trajectory
from ..engines.protocol import GenerateResult
from .capture_attempts import Attempt, Attempts
from .capture_check import in_vocabulary, untrainable
from .lineage import MAIN, Lineage
from .messages import Call, Message
from .normal import Key, next_key, prefix_keys, tools_key
from .renderer import ExtensionError, Past, Renderer, RenderError
from .rows import Rollout, to_trajectories
from .tree import BranchReason, Match, Node, Thinking, Tree


class Outcome(StrEnum):
    """What the caller does with a plan."""

    GENERATE = "generate"
    """Ask the engine, then `commit` or `abandon`."""
    JOIN = "join"
    """`first` is in flight with the same request: wait for its end, serve its turns, then `delivered(first)`. If it
    is abandoned, begin again."""
    REPLAY = "replay"
    """The same request has been answered: serve `turns` once more, then `delivered(plan)`."""


class SessionFinishedError(HeadraceError):
    """The rollout is finished: it takes no more requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One completion of an engine call."""

    result: GenerateResult
    """As the engine gave it; it need not be consistent."""
    answer: Message
    """As the client is sent it: what a replay is compared with. `handle`: the opaque mark that was sent along."""
    engine_id: str = ""
    logprobs_mode: str = "processed"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What a request comes to."""

    id: str
    outcome: Outcome
    prompt_ids: tuple[int, ...] = ()
    """The whole context; empty unless GENERATE."""
    n: int = 1
    branch: BranchReason | None = None
    """Why it does not simply go on, as far as is known before it is answered; the turn's own `branch` is final."""
    first: Plan | None = None
    """JOIN, REPLAY: the plan that the engine was or is asked for."""
    turns: tuple[Node, ...] = ()
    """REPLAY: what was answered."""
    parent: Node | None = field(default=None, repr=False)
    """The turn that it continues."""
    call: Call | None = field(default=None, repr=False)
    lineage: Lineage = MAIN
    keys: tuple[Key, ...] = field(default=(), repr=False)
    """Of the call's prefixes."""
    tools_key: Key = b""
    delta: np.ndarray | None = field(default=None, repr=False)
    """[P] int32: what `prompt_ids` add to the parent's tokens."""


class Session:
    """One rollout."""

    def __init__(
        self,
        rollout: Rollout,
        renderer: Renderer,
        *,
        thinking: Thinking = Thinking.KEEP,
        on_branch: Callable[[BranchReason], None] | None = None,
    ) -> None:
        """`on_branch` is called once for each turn that opens a branch."""
        self.rollout = rollout
        self.tree = Tree(thinking)
        self.finished = False
        self._renderer = renderer
        self._attempts = Attempts()
        self._on_branch = on_branch
        self._parents: dict[str, tuple[str, Node | None]] = {}

    @property
    def in_flight(self) -> int:
        """Plans that are neither committed nor abandoned."""
        return self._attempts.in_flight

    def begin(
        self,
        call: Call,
        *,
        lineage: Lineage = MAIN,
        idempotency_key: str | None = None,
        retry: int = 0,
        body_digest: bytes = b"",
    ) -> Plan:
        """What to do for one request. `body_digest`: of the raw body, b"" never coalesces by body.

        RenderError: the conversation cannot be put into tokens (the client's mistake). SessionFinishedError.
        """
        if self.finished:
            raise SessionFinishedError(f"rollout {self.rollout.rollout_id} is finished")
        if not call.messages:
            raise RenderError("messages: there is none; send at least one")
        attempt = self._attempts.find(
            lineage=lineage.label, digest=body_digest, idempotency_key=idempotency_key, retry=retry
        )
        if attempt is not None:
            outcome = Outcome.JOIN if attempt.in_flight else Outcome.REPLAY
            return replace(
                attempt.plan, outcome=outcome, first=attempt.plan, turns=attempt.nodes, prompt_ids=()
            )
        plan = self._plan(call, lineage)
        self._attempts.add(
            Attempt(plan=plan, lineage=lineage.label, digest=body_digest, idempotency_key=idempotency_key)
        )
        return plan

    def commit(self, plan: Plan, turns: Sequence[Sampled], *, delivered: bool = True) -> tuple[Node, ...]:
        """Record what the engine answered, one turn for each of n. `delivered`: the client has it whole.

        A turn that is not delivered is no part of any trajectory until `delivered`, or until the client replays it.
        """
        if plan.outcome is not Outcome.GENERATE:
            raise ValueError(f"plan {plan.id} asked no engine: only a GENERATE plan is committed")
        if not turns:
            raise ValueError(f"plan {plan.id}: an answer without turns; abandon it instead")
        attempt = self._attempts.get(plan.id)
        if self.finished or attempt is None or attempt.nodes:
            raise SessionFinishedError(
                f"plan {plan.id} is closed: it was committed or abandoned, or its rollout ended"
            )
        for turn in turns:
            node = self._node(plan, turn, delivered)
            self.tree.add(node)
            attempt.nodes += (node,)
            if node.branch is not None and self._on_branch is not None:
                self._on_branch(node.branch)
        return attempt.nodes

    def delivered(self, plan: Plan) -> None:
        """The client has been sent the whole response of `plan` (or of the plan that it joined)."""
        attempt = self._attempts.get(plan.id)
        for node in attempt.nodes if attempt is not None else ():
            node.delivered = True

    def abandon(self, plan: Plan) -> None:
        """Nothing was sampled for `plan`: no trace of it remains, and the same request is a new one."""
        attempt = self._attempts.get(plan.id)
        if attempt is not None and attempt.in_flight:
            self._attempts.forget(plan.id)

    def finish(self) -> list[Trajectory]:
        """All that can be trained; one aborted trajectory where nothing can. Plans in flight are dropped."""
        self.finished = True
        return to_trajectories(self.rollout, self.tree, self._parents, self._renderer.vocab_size)

    def _plan(self, call: Call, lineage: Lineage) -> Plan:
        keys, equipment = prefix_keys(call.messages), tools_key(call.tools)
        match = self.tree.match(call.messages, keys, equipment, lineage.label)
        match, delta = self._render(call, match)
        if match.node is not None:
            for node in match.node.path():
                node.delivered = True  # the client has just shown that it knows it
            ids = np.concatenate([match.node.token_ids(), delta])
        else:
            ids = delta
        if lineage.label not in self._parents:
            above = lineage.parent
            self._parents[lineage.label] = (above or "", None if above is None else self.tree.tip(above))
        return Plan(
            id=uuid.uuid4().hex,
            outcome=Outcome.GENERATE,
            prompt_ids=tuple(ids.tolist()),
            n=call.sampling.n,
            branch=match.reason,
            parent=match.node,
            call=call,
            lineage=lineage,
            keys=tuple(keys),
            tools_key=equipment,
            delta=delta,
        )

    def _render(self, call: Call, match: Match) -> tuple[Match, np.ndarray]:
        """The tokens of what is new; a root where they cannot be appended."""
        node = match.node
        if node is not None:
            past = Past(messages=node.conversation, tools=call.tools)
            try:
                return match, _ids(self._renderer.extend(past, call.messages[node.message_count :]))
            except ExtensionError:
                match = Match(None, BranchReason.TEMPLATE)
        return match, _ids(self._renderer.open(call.messages, call.tools))

    def _node(self, plan: Plan, turn: Sampled, delivered: bool) -> Node:
        assert plan.call is not None and plan.delta is not None
        call, result, parent = plan.call, turn.result, plan.parent
        reason = untrainable(result, call.sampling, self._renderer.vocab_size)
        known = parent.message_count if parent is not None else 0
        usable = in_vocabulary(result, self._renderer.vocab_size)
        sampled = result.token_ids if usable else ()
        logprobs = np.zeros(len(sampled), np.float32)
        if reason is None:
            np.minimum(np.asarray(result.logprobs, np.float32), 0.0, out=logprobs)
        return Node(
            number=len(self.tree.nodes),
            parent=parent,
            lineage=plan.lineage.label,
            tools=call.tools if parent is None else parent.tools,
            tools_key=plan.tools_key,
            prompt_key=plan.keys[-1],
            key=next_key(plan.keys[-1], turn.answer),
            head_key=plan.keys[0],
            messages=call.messages[known:],
            answer=turn.answer,
            prompt=plan.delta,
            sampled=_ids(sampled),
            logprobs=logprobs,
            tail=_ids(self._renderer.close(sampled)),
            spans=result.version_spans,
            finish_reason=result.finish_reason,
            sampling=call.sampling,
            logprobs_mode=turn.logprobs_mode,
            engine_id=turn.engine_id,
            message_count=len(call.messages) + 1,
            prompt_tokens=len(plan.prompt_ids),
            delivered=delivered,
            untrainable=reason,
            attachable=usable,
            branch=plan.branch,
        )


def _ids(values: Sequence[int]) -> np.ndarray:
    return np.asarray(values, np.int32)
