"""Which outcomes belong to which rollouts of one partition, when a rollout settles, and what its reward is.

Pure; time is the brokers' append time, so the order in which the two topics are read does not matter. An
outcome counts when it was appended within a window before or after the rollout's last trajectory, and before
the rollout settled. Of each signal the last one by event time counts (then by feedback_id).

    WAITING --all signals and the grace, or the window's end--> SETTLED --one more window--> forgotten
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from ..schemas.config import FeedbackConfig
from ..schemas.feedback import Feedback
from ..schemas.score import Score, ScoreStatus

HOP = "feedback"
REWARD = "reward"
"""The signal that replaces every other part of the reward."""
NO_FEEDBACK = "no_feedback"
NOT_FINITE = "reward_not_finite"
"""The sum of finite parts is beyond what a float holds."""


class Fate(StrEnum):
    """What an outcome event is to its rollout."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"
    """The same feedback_id is there; the first one in the log stands."""
    LATE = "late"
    """Its rollout has settled."""


class Cause(StrEnum):
    """What gave a settled score its reward."""

    OUTCOMES = "outcomes"
    DEFAULT = "default"
    VOID = "void"


@dataclass(frozen=True, slots=True)
class Outcome:
    """An event and when it was appended, in Unix milliseconds."""

    feedback: Feedback
    at_ms: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A score as it goes out."""

    score: Score
    cause: Cause


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A rollout of which nothing needs to be kept any more."""

    rollout_id: str
    trajectories: tuple[str, ...]
    outcomes: tuple[str, ...]

    @property
    def unknown(self) -> bool:
        """Its outcomes never met a trajectory."""
        return not self.trajectories


@dataclass(frozen=True, slots=True)
class JoinRule:
    """The configured part, in milliseconds."""

    wanted: frozenset[str]
    weights: dict[str, float]
    reward_weight: float
    window_ms: int
    grace_ms: int | None
    """None: settle at the window's end."""
    default: float | None
    """None: void."""

    @classmethod
    def of(cls, config: FeedbackConfig) -> JoinRule:
        """The rule that `config` describes."""
        wanted = frozenset(config.signals or config.weights or [REWARD])
        return cls(
            wanted=wanted,
            weights={name: 1.0 for name in wanted} | config.weights,
            reward_weight=config.reward_weight,
            window_ms=int(config.window_seconds * 1000),
            grace_ms=int(config.grace_seconds * 1000) if config.settle == "first" else None,
            default=None if config.default == "void" else float(config.default),
        )

    def due_ms(self, anchor_ms: int, outcomes: Iterable[Outcome], *, whole: bool) -> int:
        """When a rollout settles whose last trajectory was appended at `anchor_ms`."""
        end = anchor_ms + self.window_ms
        if self.grace_ms is None or not whole:
            return end
        missing = set(self.wanted)
        for outcome in sorted(self._within(anchor_ms, end, outcomes), key=lambda o: o.at_ms):
            missing.discard(outcome.feedback.name)
            if not missing or outcome.feedback.name == REWARD:
                return min(end, max(outcome.at_ms, anchor_ms) + self.grace_ms)
        return end

    def settle(self, score: Score, anchor_ms: int, due_ms: int, outcomes: Iterable[Outcome]) -> Settled:
        """`score`, which holds the verifier's own reward, with the outcomes that count."""
        counted = self._within(anchor_ms, due_ms, outcomes)
        latest: dict[str, Feedback] = {}
        for f in sorted((o.feedback for o in counted), key=lambda f: (f.event_ms, f.feedback_id)):
            latest[f.name] = f
        final = replace(
            score,
            components=_components(score, latest, counted, own=self.reward_weight != 0),
            stamps=(*score.stamps, (HOP, due_ms)),
        )
        if REWARD in latest:
            return Settled(replace(final, reward=latest[REWARD].value, turn_rewards=None), Cause.OUTCOMES)
        known = sorted(latest.keys() & self.weights.keys())
        if not known and self.default is None:
            void = replace(final, status=ScoreStatus.VOID, reason=NO_FEEDBACK, reward=None, turn_rewards=None)
            return Settled(void, Cause.VOID)
        added = sum(self.weights[n] * latest[n].value for n in known) if known else self.default or 0.0
        reward = self.reward_weight * (score.reward or 0.0) + added
        turns = score.turn_rewards
        if turns and self.reward_weight:  # an outcome is known at the end only
            scaled = [self.reward_weight * t for t in turns]
            turns = (*scaled[:-1], scaled[-1] + added)
        else:
            turns = None
        if not all(map(math.isfinite, (reward, *(turns or ())))):
            void = replace(final, status=ScoreStatus.VOID, reason=NOT_FINITE, reward=None, turn_rewards=None)
            return Settled(void, Cause.VOID)
        cause = Cause.OUTCOMES if known else Cause.DEFAULT
        return Settled(replace(final, reward=reward, turn_rewards=turns), cause)

    def _within(self, anchor_ms: int, end_ms: int, outcomes: Iterable[Outcome]) -> list[Outcome]:
        return [o for o in outcomes if anchor_ms - self.window_ms <= o.at_ms <= end_ms]


def _components(
    score: Score, latest: dict[str, Feedback], counted: list[Outcome], *, own: bool
) -> str | None:
    """The verifier's components, its reward, each signal's value, and how many events each had when several."""
    found: dict[str, float] = json.loads(score.components) if score.components else {}
    if own and score.reward is not None:
        found["verifier"] = score.reward
    for name in sorted(latest):
        found[f"{HOP}.{name}"] = latest[name].value
        count = sum(o.feedback.name == name for o in counted)
        if count > 1:
            found[f"{HOP}.{name}.events"] = float(count)
    return json.dumps(found) if found else None


@dataclass(slots=True)
class _Waiting:
    score: Score
    at_ms: int


@dataclass(slots=True)
class _Rollout:
    waiting: dict[str, _Waiting] = field(default_factory=dict)
    """trajectory_id -> its score so far."""
    settled: dict[str, int] = field(default_factory=dict)
    """trajectory_id -> when it was appended."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def anchor_ms(self) -> int:
        return max(w.at_ms for w in self.waiting.values())

    @property
    def whole(self) -> bool:
        count = next(iter(self.waiting.values())).score.trajectory_count
        return len(self.waiting) + len(self.settled) >= count


class FeedbackBook:
    """The rollouts of one partition."""

    def __init__(self, rule: JoinRule) -> None:
        self._rule = rule
        self._rollouts: dict[str, _Rollout] = {}
        self._due: list[tuple[int, str]] = []
        """A heap; what has become later meanwhile is put back when it comes up."""

    def __len__(self) -> int:
        """Number of rollouts that wait."""
        return sum(bool(r.waiting) for r in self._rollouts.values())

    @property
    def nearest_ms(self) -> int | None:
        """Nothing happens by the clock before this."""
        return self._due[0][0] if self._due else None

    def add_score(self, score: Score, at_ms: int) -> bool:
        """Let `score`, of a trajectory appended at `at_ms`, wait; False when it has been settled before."""
        rollout = self._rollouts.setdefault(score.rollout_id, _Rollout())
        if score.trajectory_id in rollout.settled:
            return False
        rollout.waiting.setdefault(score.trajectory_id, _Waiting(score, at_ms))
        self._schedule(score.rollout_id, rollout)
        return True

    def add_settled(self, rollout_id: str, trajectory_id: str, at_ms: int) -> None:
        """Take note of a trajectory whose score was delivered before."""
        rollout = self._rollouts.setdefault(rollout_id, _Rollout())
        rollout.settled[trajectory_id] = at_ms
        self._schedule(rollout_id, rollout)

    def add_outcome(self, feedback: Feedback, at_ms: int) -> Fate:
        """Take an event appended at `at_ms`."""
        rollout = self._rollouts.setdefault(feedback.rollout_id, _Rollout())
        if feedback.feedback_id in rollout.outcomes:
            return Fate.DUPLICATE
        late = bool(rollout.settled) and not rollout.waiting
        if not late:
            rollout.outcomes[feedback.feedback_id] = Outcome(feedback, at_ms)
            self._schedule(feedback.rollout_id, rollout)
        return Fate.LATE if late else Fate.TAKEN

    def advance(self, horizon_ms: int) -> tuple[list[Settled], list[Forgotten]]:
        """What is due before `horizon_ms`; only once everything appended until then has been added."""
        settled: list[Settled] = []
        forgotten: list[Forgotten] = []
        while self._due and self._due[0][0] < horizon_ms:
            _, name = heapq.heappop(self._due)
            rollout = self._rollouts.get(name)
            if rollout is None:
                continue
            if self._next_ms(rollout) < horizon_ms:
                if rollout.waiting:
                    settled += self._settle(rollout)
                else:
                    del self._rollouts[name]
                    forgotten.append(Forgotten(name, tuple(rollout.settled), tuple(rollout.outcomes)))
                    continue
            self._schedule(name, rollout)
        return settled, forgotten

    def _settle(self, rollout: _Rollout) -> list[Settled]:
        due, anchor = self._next_ms(rollout), rollout.anchor_ms
        found = [
            self._rule.settle(w.score, anchor, due, rollout.outcomes.values())
            for _, w in sorted(rollout.waiting.items())
        ]
        rollout.settled.update({name: w.at_ms for name, w in rollout.waiting.items()})
        rollout.waiting.clear()
        return found

    def _next_ms(self, rollout: _Rollout) -> int:
        if rollout.waiting:
            return self._rule.due_ms(rollout.anchor_ms, rollout.outcomes.values(), whole=rollout.whole)
        if rollout.settled:
            return max(rollout.settled.values()) + 2 * self._rule.window_ms
        return max(o.at_ms for o in rollout.outcomes.values()) + self._rule.window_ms

    def _schedule(self, name: str, rollout: _Rollout) -> None:
        heapq.heappush(self._due, (self._next_ms(rollout), name))
