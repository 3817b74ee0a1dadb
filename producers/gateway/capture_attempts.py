"""Which requests are the same request sent again. Bodies that are equal are not enough: a compaction can repeat one.

A request joins an earlier one only (a) by an equal Idempotency-Key, (b) by an equal body and a retry count above 0,
or (c) by an equal body while the earlier one is in flight or its response was never fully written.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tree import Node

if TYPE_CHECKING:
    from .capture import Plan

REMEMBERED = 64
"""Finished attempts of a session that a retry can still find."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One engine call and everything that asked for it."""

    plan: Plan
    lineage: str
    digest: bytes
    idempotency_key: str | None
    nodes: tuple[Node, ...] = ()
    """Its turns, once they are committed."""

    @property
    def in_flight(self) -> bool:
        """Nothing is committed yet."""
        return not self.nodes

    @property
    def complete(self) -> bool:
        """Whether its turns can be served again: none was cut off by the client's leaving."""
        return bool(self.nodes) and all(n.finish_reason != "abort" for n in self.nodes)

    @property
    def delivered(self) -> bool:
        """The client has the whole response."""
        return bool(self.nodes) and all(n.delivered for n in self.nodes)


class Attempts:
    """The attempts of a session by plan id, oldest first."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Attempt] = OrderedDict()

    def add(self, attempt: Attempt) -> None:
        """Remember it; the oldest finished one beyond the limit is forgotten."""
        self._known[attempt.plan.id] = attempt
        if len(self._known) > REMEMBERED:
            done = next((i for i, a in self._known.items() if not a.in_flight), None)
            if done is not None:
                del self._known[done]

    def get(self, plan_id: str) -> Attempt | None:
        """By the id of its plan."""
        return self._known.get(plan_id)

    def forget(self, plan_id: str) -> None:
        """Nothing came of it: the same request is a new one."""
        self._known.pop(plan_id, None)

    def find(self, *, lineage: str, digest: bytes, idempotency_key: str | None, retry: int) -> Attempt | None:
        """The newest attempt that a request repeats."""
        for attempt in reversed(self._known.values()):
            if attempt.lineage != lineage or not (attempt.in_flight or attempt.complete):
                continue
            if idempotency_key is not None and attempt.idempotency_key is not None:
                if idempotency_key == attempt.idempotency_key:
                    return attempt
            elif digest and digest == attempt.digest and (retry > 0 or not attempt.delivered):
                return attempt
        return None

    @property
    def in_flight(self) -> int:
        """Attempts of which nothing is committed."""
        return sum(a.in_flight for a in self._known.values())
