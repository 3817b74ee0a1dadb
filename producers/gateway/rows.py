"""A session's turns -> training rows, in which every sampled token is trained exactly once.

A row is a path from a root to a turn that no trainable turn comes after. What two rows share is masked true in the
first of them only. Turns that were sampled with other parameters than the rest of their row get a row of their own
over the same tokens: a record has one set of sampling parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.trajectory import Sampling, Split, Trajectory, TrajectoryStatus, Turn, VersionSpan
from .messages import Message
from .tree import Node, Tree

Parents = Mapping[str, tuple[str, Node | None]]
"""Lineage -> the lineage that started it and the newest turn of that one at the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What the trajectories of a rollout share."""

    rollout_id: str
    policy_id: str
    session_id: str | None = None
    task_id: str = ""
    """"": the rollout's own id; production traffic sees each prompt once."""
    group_id: str = ""
    """"": the rollout's own id."""
    group_size: int = 1
    group_deadline_ms: int = 0
    split: Split = Split.TRAIN
    reward_spec: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    path: list[Node]
    trained: set[Node]
    """Those of the path whose tokens this row trains."""


def to_trajectories(rollout: Rollout, tree: Tree, parents: Parents, vocab_size: int) -> list[Trajectory]:
    """All rows of a session, in the order of their last turns; one aborted trajectory where there is none."""
    rows = _rows(tree.nodes)
    if not rows:
        return [_aborted(rollout, tree.nodes)]
    index = {node: i for i, row in enumerate(rows) for node in row.trained}
    return [_trajectory(rollout, i, rows, index, parents, vocab_size) for i in range(len(rows))]


def _rows(nodes: Sequence[Node]) -> list[_Row]:
    continued: set[Node] = set()
    for node in nodes:
        above = node.parent if node.trainable else None
        while above is not None and above not in continued:
            continued.add(above)
            above = above.parent
    rows: list[_Row] = []
    done: set[Node] = set()
    for leaf in nodes:
        if not leaf.trainable or leaf in continued:
            continue
        path = leaf.path()
        left = [n for n in path if n.trainable and n not in done]
        for kind in dict.fromkeys(map(_kind, left)):
            trained = [n for n in left if _kind(n) == kind]
            rows.append(_Row(path[: path.index(trained[-1]) + 1], set(trained)))
        done.update(left)
    return rows


def _kind(node: Node) -> tuple[Any, ...]:
    s = node.sampling
    return s.temperature, s.top_p, s.top_k, node.logprobs_mode


def _trajectory(
    rollout: Rollout, i: int, rows: list[_Row], index: dict[Node, int], parents: Parents, vocab_size: int
) -> Trajectory:
    row = rows[i]
    leaf = row.path[-1]
    ids, masks, logprobs = [], [], []
    spans: list[VersionSpan] = []
    turns: list[Turn] = []
    position = 0
    for node in row.path:
        start = position + len(node.prompt)
        end = start + len(node.sampled)
        trained = node in row.trained
        ids += [node.prompt, node.sampled, node.tail]
        for part, mine in ((node.prompt, False), (node.sampled, trained), (node.tail, False)):
            masks.append(np.full(len(part), mine))
            logprobs.append(node.logprobs if mine else np.zeros(len(part), np.float32))
        if trained:
            spans += [VersionSpan(s.version, start + s.start, start + s.end) for s in node.spans]
            turns.append(
                Turn(start=start, end=end, finish_reason=node.finish_reason, tool_calls=_calls(node.answer))
            )
        position = end + len(node.tail)
    return Trajectory(
        trajectory_id=f"{rollout.rollout_id}-{i}",
        trajectory_index=i,
        trajectory_count=len(rows),
        **_shared(rollout),
        engine_id=leaf.engine_id,
        token_ids=np.concatenate(ids),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        version_spans=tuple(spans),
        turns=tuple(turns),
        sampling=Sampling(
            temperature=leaf.sampling.temperature,
            top_p=leaf.sampling.top_p,
            top_k=leaf.sampling.top_k,
            max_tokens=leaf.sampling.max_tokens or 0,
            logprobs_mode=leaf.logprobs_mode,
        ),
        stop_reason=leaf.finish_reason,
        vocab_size=vocab_size,
        messages=json.dumps([_message(m) for m in leaf.conversation()], ensure_ascii=False),
        metadata=json.dumps(_metadata(rollout, row, index, parents)),
    )


def _shared(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id or rollout.rollout_id,
        "group_size": rollout.group_size,
        "group_deadline_ms": rollout.group_deadline_ms,
        "task_id": rollout.task_id or rollout.rollout_id,
        "policy_id": rollout.policy_id,
        "session_id": rollout.session_id,
        "split": rollout.split,
        "reward_spec": rollout.reward_spec,
    }


def _metadata(rollout: Rollout, row: _Row, index: dict[Node, int], parents: Parents) -> dict[str, Any]:
    """Where a row belongs among those of its session."""
    leaf = row.path[-1]
    own = [n for n in row.path if n in row.trained]
    shared = [n for n in row.path if n.trainable and n not in row.trained]
    found: dict[str, Any] = {"lineage": leaf.lineage}
    started, at = parents.get(leaf.lineage, ("", None))
    if leaf.lineage:
        found["parent_lineage"] = started
    if at is not None:
        found["parent_trajectory"] = _name(rollout, index.get(at))
        found["parent_turn"] = at.number
    reasons = [n.branch.value for n in own if n.branch is not None]
    if reasons:
        found["branch"] = reasons[0]
    if shared:
        found["branch_of"] = _name(rollout, index.get(shared[-1]))
        found["shared_turns"] = [n.number for n in shared]
    found["turns"] = [n.number for n in own]
    torn = {str(n.number): n.untrainable for n in row.path if n.untrainable is not None}
    if torn:
        found["untrainable"] = torn
    return found


def _name(rollout: Rollout, i: int | None) -> str | None:
    return None if i is None else f"{rollout.rollout_id}-{i}"


def _aborted(rollout: Rollout, nodes: Sequence[Node]) -> Trajectory:
    reasons = [n.untrainable or "undelivered" for n in nodes]
    return Trajectory(
        trajectory_id=f"{rollout.rollout_id}-0",
        **_shared(rollout),
        status=TrajectoryStatus.ABORTED,
        reason=reasons[0] if reasons else "empty: no turn was sampled",
        token_ids=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
        logprobs=np.zeros(0, np.float32),
        version_spans=(),
        turns=(),
        stop_reason="abort",
    )


def _calls(answer: Message) -> str | None:
    if not answer.tool_calls:
        return None
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in answer.tool_calls]
    return json.dumps(calls, ensure_ascii=False)


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role.value, "content": message.text}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = json.loads(_calls(message) or "[]")
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found
