"""The turns of one session as a forest: a node is one sampled turn behind the messages that led to it.

A request is matched to the deepest turn whose whole conversation it repeats, found by the key of each prefix that
ends in an answer. What a request says after that turn is new; everything before it is the turn's stored tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from ...schemas.trajectory import VersionSpan
from .messages import Message, Role, Sampling, Tool
from .normal import Key, same_reasoning


class BranchReason(StrEnum):
    """Why a turn does not continue the newest turn of its agent."""

    EDITED = "edited"
    """The client changed something that it had sent or been sent."""
    COMPACTION = "compaction"
    """The client replaced its history by a shorter one."""
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE = "template"
    """The chat template would have rewritten earlier tokens."""
    AMBIGUOUS = "ambiguous"
    """Several stored turns fit and nothing tells them apart; the newest was taken."""
    RESAMPLED = "resampled"
    """Another answer to the same prompt: n > 1, or the same request once more. Not a mismatch."""


class Thinking(StrEnum):
    """What it means that a client replays other reasoning than was sampled."""

    KEEP = "keep"
    """Nothing: the sampled tokens stand."""
    BRANCH = "branch"
    """Altered reasoning is an edit; dropped reasoning is not."""


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """One sampled turn."""

    number: int
    """0-based order of the session's turns."""
    parent: Node | None
    lineage: str
    tools: tuple[Tool, ...]
    tools_key: Key
    prompt_key: Key
    """Of the conversation that it answers."""
    key: Key
    """The same with its answer."""
    head_key: Key
    """Of the first message."""
    messages: tuple[Message, ...]
    """New since the parent."""
    answer: Message
    """As the client was sent it."""
    prompt: np.ndarray
    """[P] int32: what was appended to the parent's tokens before sampling."""
    sampled: np.ndarray
    """[S] int32."""
    logprobs: np.ndarray
    """[S] float32; zeros where `untrainable`."""
    tail: np.ndarray
    """int32: closes the turn, written by the renderer."""
    spans: tuple[VersionSpan, ...]
    """Tile [0, S)."""
    finish_reason: str
    sampling: Sampling
    logprobs_mode: str
    engine_id: str
    message_count: int
    """Messages of the whole conversation, the answer included."""
    prompt_tokens: int
    """Tokens of the whole prompt."""
    delivered: bool
    untrainable: str | None = None
    """Why its tokens must not be trained."""
    attachable: bool = True
    """False where its tokens cannot be a context: an id outside the vocabulary."""
    branch: BranchReason | None = None
    children: list[Node] = field(default_factory=list)

    @property
    def trainable(self) -> bool:
        """Whether the loss may use its tokens."""
        return self.delivered and self.untrainable is None

    def path(self) -> list[Node]:
        """From its root to itself."""
        nodes: list[Node] = []
        at: Node | None = self
        while at is not None:
            nodes.append(at)
            at = at.parent
        return nodes[::-1]

    def token_ids(self) -> np.ndarray:
        """All tokens up to the end of this turn, its tail included; int32."""
        return np.concatenate([part for n in self.path() for part in (n.prompt, n.sampled, n.tail)])

    def conversation(self) -> list[Message]:
        """All messages up to and including the answer."""
        return [m for n in self.path() for m in (*n.messages, n.answer)]


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request attaches: below `node`, or as a root."""

    node: Node | None
    reason: BranchReason | None


class Tree:
    """All turns of a session."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self.nodes: list[Node] = []
        self._by_key: dict[Key, list[Node]] = {}
        self._lineages: dict[str, list[Node]] = {}

    def add(self, node: Node) -> None:
        """`node` becomes a place to attach to."""
        node.branch = node.branch or self._fork(node.parent, node.lineage, node.tools_key, node.prompt_key)
        self.nodes.append(node)
        if node.attachable:
            self._by_key.setdefault(node.key, []).append(node)
        self._lineages.setdefault(node.lineage, []).append(node)
        if node.parent is not None:
            node.parent.children.append(node)

    def tip(self, lineage: str) -> Node | None:
        """The newest turn of an agent."""
        nodes = self._lineages.get(lineage)
        return nodes[-1] if nodes else None

    def match(self, messages: Sequence[Message], keys: Sequence[Key], tools: Key, lineage: str) -> Match:
        """The deepest turn that `messages` repeat. `keys`: of their prefixes."""
        reason: BranchReason | None = None
        for i in range(len(messages) - 1, -1, -1):
            if messages[i].role is not Role.ASSISTANT or not (said := self._by_key.get(keys[i])):
                continue
            equipped = [n for n in said if n.tools_key == tools]
            fit = [n for n in equipped if self._thought_so(n, messages)]
            if fit:
                node, ambiguous = _best(fit, messages, lineage)
                return Match(node, reason or (BranchReason.AMBIGUOUS if ambiguous else None))
            reason = reason or (BranchReason.EDITED if equipped else BranchReason.TOOLS_CHANGED)
        return Match(None, reason or self._new_root(messages, keys, tools, lineage))

    def _thought_so(self, node: Node, messages: Sequence[Message]) -> bool:
        if self._thinking is Thinking.KEEP:
            return True
        return all(
            same_reasoning(n.answer.reasoning, messages[n.message_count - 1].reasoning) for n in _upward(node)
        )

    def _fork(self, parent: Node | None, lineage: str, tools: Key, prompt: Key) -> BranchReason | None:
        """Why a turn that fits below `parent` is not its first. Turns that nobody saw do not count."""
        siblings = parent.children if parent is not None else self._roots(lineage)
        siblings = [n for n in siblings if n.lineage == lineage and n.delivered]
        if any(n.prompt_key == prompt and n.tools_key == tools for n in siblings):
            return BranchReason.RESAMPLED
        return BranchReason.EDITED if siblings and parent is not None else None

    def _roots(self, lineage: str) -> list[Node]:
        return [n for n in self._lineages.get(lineage, ()) if n.parent is None]

    def _new_root(
        self, messages: Sequence[Message], keys: Sequence[Key], tools: Key, lineage: str
    ) -> BranchReason | None:
        """Why an agent starts anew; None for its first conversation, and for another one beside it."""
        roots = [n for n in self._roots(lineage) if n.delivered]
        asked = [n for n in roots if n.prompt_key == keys[-1]]
        if asked:
            return None if any(n.tools_key == tools for n in asked) else BranchReason.TOOLS_CHANGED
        if not roots or not (lineage or any(n.head_key == keys[0] for n in roots)):
            return None
        longest = max(n.message_count for n in self._lineages[lineage])
        return BranchReason.COMPACTION if len(messages) < longest else BranchReason.EDITED


def _upward(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _best(nodes: list[Node], messages: Sequence[Message], lineage: str) -> tuple[Node, bool]:
    """The turn that is meant among those whose conversation is the same; whether that is a guess."""
    if len(nodes) == 1:
        return nodes[0], False
    ranked = sorted(nodes, key=lambda n: (*_evidence(n, messages, lineage), n.number))
    first, second = ranked[-1], ranked[-2]
    return first, _evidence(first, messages, lineage) == _evidence(second, messages, lineage)


def _evidence(node: Node, messages: Sequence[Message], lineage: str) -> tuple[bool, int, bool]:
    """Same agent; how many answers carry this path's own marks; whether the client is known to have it."""
    marks = 0
    for n in _upward(node):
        said, replayed = n.answer, messages[n.message_count - 1]
        marks += replayed.handle is not None and replayed.handle == said.handle
        marks += bool(said.tool_calls) and [c.id for c in said.tool_calls] == [
            c.id for c in replayed.tool_calls
        ]
    return node.lineage == lineage, marks, node.delivered
