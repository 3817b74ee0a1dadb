"""The open rollouts: which one a request belongs to, and when each ends.

A request is of the rollout that its URL, its key or its client's headers name. Without a name it is of the rollout
that has given the answer which it repeats; one that repeats none begins a new one.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...schemas.trajectory import Trajectory
from .capture import Session
from .errors import busy
from .messages import Call, Role
from .normal import Key, prefix_keys
from .tree import Node

REMEMBERED = 1 << 16
"""Answers and bodies by which unnamed conversations are found again; of those not used longest the oldest go."""


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRollout:
    """A rollout that takes requests."""

    session: Session
    tenant: str
    name: str | None
    raw: bool = False
    """Of raw prompts."""
    used: float
    """When a request came or ended last, by the registry's clock."""
    requests: int = 0
    """Being served."""
    trajectories: list[Trajectory] | None = None
    """Once it is finished."""
    stamps: tuple[tuple[str, int], ...] = ()
    """(hop, Unix milliseconds) of its beginning."""
    keys: list[Key] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The rollout_id."""
        return self.session.rollout.rollout_id


class Rollouts:
    """All of them. Lives on one event loop."""

    def __init__(
        self,
        make: Callable[[str, str | None, bool], Session],
        *,
        most: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        refuse: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`make`: (rollout_id, session name, for raw prompts) -> session; `refuse`: why no new rollout may begin, or None."""
        self._make, self._most, self._clock, self._refuse = make, most, clock, refuse
        self._now_ms = now_ms
        self._open: dict[str, OpenRollout] = {}
        self._named: dict[tuple[str, str, bool], OpenRollout] = {}
        self._answers: OrderedDict[tuple[str, Key], OpenRollout] = OrderedDict()
        self._bodies: OrderedDict[tuple[str, bytes], OpenRollout] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, rollout_id: str, tenant: str) -> OpenRollout | None:
        """By its id, if it is this tenant's."""
        found = self._open.get(rollout_id)
        return found if found is not None and found.tenant == tenant else None

    def of_request(
        self, tenant: str, name: str | None, call: Call, body: bytes, *, again: bool
    ) -> OpenRollout:
        """The rollout of a request. `body`: digest of its body; `again`: the client says that it is a retry.

        RequestError 503 where a new one may not begin.
        """
        raw = call.prompt is not None
        if name is not None:
            found = self._named.get((tenant, name, raw))
        else:
            found = self._by_answer(tenant, call) or self._by_body(tenant, body, again=again)
        if found is None:
            found = self._begin(tenant, name, raw)
        if name is None:
            _remember(self._bodies, (tenant, body), found)
        found.used = self._clock()
        return found

    def touch(self, rollout: OpenRollout) -> None:
        """Something has happened to it."""
        rollout.used = self._clock()

    def answered(self, rollout: OpenRollout, nodes: Sequence[Node]) -> None:
        """Its conversation now goes on from these turns."""
        if rollout.name is None and rollout.trajectories is None:
            for node in nodes:
                rollout.keys.append(node.key)
                _remember(self._answers, (rollout.tenant, node.key), rollout)

    def finish(self, rollout: OpenRollout) -> list[Trajectory]:
        """Its trajectories; it takes no more requests. The same list again where it was finished before."""
        if rollout.trajectories is None:
            rollout.trajectories = rollout.session.finish()
            if rollout.name is not None:
                self._named.pop((rollout.tenant, rollout.name, rollout.raw), None)
            for key in rollout.keys:
                if self._answers.get((rollout.tenant, key)) is rollout:
                    del self._answers[rollout.tenant, key]
        return rollout.trajectories

    def forget(self, rollout: OpenRollout) -> None:
        """It is in safe hands."""
        self._open.pop(rollout.id, None)

    def drop_if_empty(self, rollout: OpenRollout) -> None:
        """Nothing came of the request that began an unnamed one: no client knows its id."""
        session = rollout.session
        if rollout.name is None and not (rollout.requests or session.in_flight or session.tree.nodes):
            self.finish(rollout)
            self.forget(rollout)

    def idle(self, seconds: float) -> list[OpenRollout]:
        """Those to which nothing has happened for so long; empty ones are forgotten on the way."""
        before = self._clock() - seconds
        found = [r for r in self._open.values() if not r.requests and r.used <= before]
        for r in found:
            if not r.session.tree.nodes:
                self.finish(r)
                self.forget(r)
        return [r for r in found if r.session.tree.nodes]

    def all(self) -> Iterable[OpenRollout]:
        """A copy."""
        return list(self._open.values())

    def _begin(self, tenant: str, name: str | None, raw: bool) -> OpenRollout:
        why = self._refuse()
        if why is None and len(self._open) >= self._most:
            why = f"{len(self._open)} rollouts are open, gateway.max_rollouts is {self._most}"
        if why is not None:
            raise busy(f"no new session can begin: {why}", retry_after=5)
        session = self._make(uuid.uuid4().hex, name, raw)
        stamps = (("gateway_start", self._now_ms()),)
        found = OpenRollout(
            session=session, tenant=tenant, name=name, raw=raw, used=self._clock(), stamps=stamps
        )
        self._open[found.id] = found
        if name is not None:
            self._named[tenant, name, raw] = found
        return found

    def _by_answer(self, tenant: str, call: Call) -> OpenRollout | None:
        keys = prefix_keys(call.messages)
        for i in range(len(keys) - 1, -1, -1):
            if call.messages[i].role is Role.ASSISTANT and (found := self._answers.get((tenant, keys[i]))):
                return found
        return None

    def _by_body(self, tenant: str, body: bytes, *, again: bool) -> OpenRollout | None:
        """A request that was sent again before it was answered, or because the client missed the answer."""
        found = self._bodies.get((tenant, body))
        if found is None or found.trajectories is not None:
            return None
        # Without the client's word for it, an equal body in flight is another client's: many ask the same.
        nodes = found.session.tree.nodes
        unheard = not found.session.in_flight and not (nodes and all(n.delivered for n in nodes))
        return found if again or unheard else None


def _remember(known: OrderedDict, key: tuple, rollout: OpenRollout) -> None:
    known[key] = rollout
    known.move_to_end(key)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
