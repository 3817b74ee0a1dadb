"""The rewards that came before a group: what baselines beyond the group are made from, a function of the log.

The history of a group is the last `window` scored training rollouts of its policy in its partition, by offset,
before the group's first record. It does not matter when groups close or how fast a worker is. A worker that
takes over reads RECALL_FACTOR * window records before its start: the histories, and with them the advantages,
are exactly the same if `window` rollouts of the policy are among these, or if the log begins there.
"""

from __future__ import annotations

from collections import OrderedDict

from ..schemas.score import Score, ScoreStatus
from ..schemas.trajectory import Split

RECALL_FACTOR = 4


class Baselines:
    """Histories of one partition, per policy."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._seen_to = -1
        self._rewards: dict[str, OrderedDict[str, float]] = {}
        """policy_id -> rollout_id -> reward, oldest first."""
        self._before: dict[str, tuple[float, ...]] = {}
        """group_id -> history at its first record."""

    def open(self, group_id: str, policy_id: str) -> None:
        """A group took a record, not yet observed: the history of its first one is kept."""
        if self._window and group_id not in self._before:
            self._before[group_id] = tuple(self._rewards.get(policy_id, {}).values())

    def close(self, group_id: str) -> tuple[float, ...]:
        """The history of a group that has closed, oldest first."""
        return self._before.pop(group_id, ())

    def observe(self, score: Score, offset: int) -> None:
        """Take the record at `offset`; what was read before, is void or of the eval split is passed over.

        Of a rollout in several trajectories the last one's reward counts, for it is the rollout's.
        """
        if not self._window or offset <= self._seen_to:
            return
        self._seen_to = offset
        if score.split is Split.EVAL or score.status is ScoreStatus.VOID or score.reward is None:
            return
        rewards = self._rewards.setdefault(score.policy_id, OrderedDict())
        if score.trajectory_index != score.trajectory_count - 1 or score.rollout_id in rewards:
            return
        rewards[score.rollout_id] = score.reward
        if len(rewards) > self._window:
            rewards.popitem(last=False)
