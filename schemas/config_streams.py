"""The sections of the stream processors: verify, feedback, advantage, staleness, streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .config_section import Section


class VerifyConfig(Section):
    reward: str = "exact_match"
    """Built-in name or `module:attr`; a task's own reward spec wins."""
    reward_args: dict[str, Any] = {}
    timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    failure_reward: float = 0.0
    """What a failed policy gets."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    isolation: Literal["process", "thread"] = "process"
    """Where a user's own reward functions run: in confined processes, or unguarded in the worker's threads."""
    hosts: Annotated[int, Field(ge=1, le=64)] = 2
    """Processes that share `concurrency`."""
    memory_mb: Annotated[int, Field(ge=256)] = 4096
    """Address space of each process; what libraries map counts."""
    allow: list[Literal["network", "write", "processes"]] = []
    """What reward functions may do beyond computing and writing to their own scratch folder."""
    sandbox: Literal["prefer", "require"] = "prefer"
    """require: rollouts are void (sandbox_unavailable) where this machine lacks a layer of the sandbox."""


class FeedbackConfig(Section):
    """Outcomes that come after the rollout (`headrace feedback send`); see streams/feedback_book.py for the rules."""

    enabled: bool = False
    """A score waits for outcomes; naming `signals` switches it on too."""
    signals: list[str] = []
    """Names to wait for; empty: those in `weights`, or without any the signal `reward`."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """What one unit of a signal adds to the reward; 1 for a signal that is waited for and not named here."""
    reward_weight: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Of the verifier's own reward; 0: the verifier is not asked."""
    settle: Literal["first", "window"] = "first"
    """first: `grace_seconds` after all signals are there; window: at its end, so that later contradictions count."""
    grace_seconds: Annotated[float, Field(ge=0)] = 0.0
    window_seconds: Annotated[float, Field(ge=1, le=6 * 86400)] = 3600.0
    """From the append of the trajectory; below the 7 days for which trajectories are kept. A group of more than one
    stays open, and holds back the commits of its partition, until its last member has settled."""
    default: Annotated[float, Field(allow_inf_nan=False)] | Literal["void"] = "void"
    """When no signal came: what is added in their place, or a void score with the reason `no_feedback`."""

    @property
    def on(self) -> bool:
        """Whether scores wait."""
        return self.enabled or bool(self.signals)

    @property
    def names(self) -> set[str]:
        """The signals that count: those waited for, those with a weight, and `reward`."""
        return {*self.signals, *self.weights, "reward"}

    @property
    def extension_ms(self) -> int:
        """How much later than without feedback a group closes: the window, and an hour for a worker that was away."""
        return int(self.window_seconds * 1000) + 3_600_000 if self.on else 0


class AdvantageConfig(Section):
    estimator: Literal["rloo", "grpo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "ema"] = "rloo"
    """reinforce_pp, reinforce_pp_baseline and ema use the last `window` rewards too, so that lone rollouts
    (rollout.group_size 1, traffic) have a signal."""
    window: Annotated[int, Field(ge=1, le=4096)] = 256
    """Rollouts per policy and partition whose rewards make the baseline beyond the group."""
    ema_decay: Annotated[float, Field(gt=0, le=1)] = 0.99
    """Weight of a reward relative to the next newer one."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of later turns' rewards, where the reward is per turn."""
    drop_zero_variance: bool = False
    """Drop the samples of a group whose rewards are all equal, after their advantage is computed."""
    drop_truncated: bool = False
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Drop longer trajectories as over_long, after their advantage is computed."""
    max_tokens_of: Literal["total", "sampled"] = "total"
    """Which tokens max_tokens counts: all, or the sampled ones."""


class StalenessConfig(Section):
    max_lag: Annotated[int, Field(ge=0)] = 4
    """Largest (version being updated) - (oldest version among the trained tokens)."""
    admission_lag: Annotated[int, Field(ge=0)] | None = None
    """The lag that rollouts are admitted for; below max_lag it leaves room for slow ones. None: max_lag."""

    @model_validator(mode="after")
    def _admits_no_stale_ones(self) -> StalenessConfig:
        if self.admission_lag is not None and self.admission_lag > self.max_lag:
            raise ValueError(
                f"admission_lag {self.admission_lag} is above max_lag {self.max_lag}: use at most max_lag"
            )
        return self

    @property
    def admitted_lag(self) -> int:
        """What admission goes by."""
        return self.max_lag if self.admission_lag is None else self.admission_lag


class StreamsConfig(Section):
    workers: Annotated[int, Field(ge=1)] = 1
    watchdog_seconds: Annotated[float, Field(gt=0)] = 15.0
    """A worker that owns records to read and moves none for this long ends itself; the supervisor starts a new one."""
