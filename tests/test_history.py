"""What a run's summary says, from hand-made records of `weights` and `engines`; and when a run is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.deploy.history import History, percentile
from headrace.deploy.running import PLOT, Goal, farewell, go_on
from headrace.deploy.view import phase_text, progress_line, sparkline
from headrace.deploy.voids import find_clue, hopeless, voids_line
from headrace.schemas.engine import EngineState, EngineStatus
from headrace.schemas.score import Ref
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord


def weights(version: int, reward: float | None = None, *, samples: int = 4, **metrics: float) -> WeightRecord:
    anchor = WeightBlob(kind=BlobKind.ANCHOR, uri="a", size=1000, sha256="0" * 64)
    delta = WeightBlob(kind=BlobKind.DELTA, uri="d", size=100 + version, sha256="0" * 64)
    return WeightRecord(
        policy_id="p",
        version=version,
        base_version=version - 1 if version else None,
        base_hash=1 if version else None,
        weights_hash=version,
        blobs=(delta,) if version else (anchor,),
        samples=tuple(Ref(0, i) for i in range(samples)) if version else (),
        dropped={"stale": 2} if version > 1 else {},
        full_bytes=5000,
        metrics={} if reward is None else {"reward_mean": reward, **metrics},
        created_ms=1000 * version,
    )


def status(version: int, *, updates: int, tokens: int, at_ms: int, pause_ms: float = 1.0) -> EngineStatus:
    return EngineStatus(
        engine_id="e",
        policy_id="p",
        state=EngineState.IDLE,
        version=version,
        updates=updates,
        generated_tokens=tokens,
        at_ms=at_ms,
        pause_ms=pause_ms,
    )


def test_the_curve_is_an_exponential_mean_that_starts_at_the_first_reward() -> None:
    history = History()
    for record in (weights(0), weights(1, 0.5), weights(2, 1.0)):
        history.add_weights(record)
    assert [s.reward_ema for s in history.steps] == [0.5, pytest.approx(0.55)]
    assert history.version == 2 and history.trained == 8


def test_the_summary_is_computed_from_the_log() -> None:
    history = History()
    history.add_weights(weights(0))
    history.add_weights(weights(1, 0.25, samples=1, lag_mean=0.0, lag_max=0))
    history.add_weights(weights(2, 0.75, samples=3, lag_mean=2.0, lag_max=3))
    history.trajectories = 9
    for record in (
        status(-1, updates=0, tokens=0, at_ms=0),
        status(0, updates=1, tokens=0, at_ms=500, pause_ms=900.0),
        status(0, updates=1, tokens=100, at_ms=1000),
        status(1, updates=2, tokens=200, at_ms=2000, pause_ms=3.0),
        status(2, updates=3, tokens=500, at_ms=3000, pause_ms=5.0),
    ):
        history.add_engine(record)
    summary = history.summary(task="t", seed=7, seconds=12.345, started_ms=-500)
    assert summary == {
        "task": "t",
        "seed": 7,
        "steps": 2,
        "seconds": 12.35,
        "first_step_seconds": 1.5,
        "reward_start": 0.25,
        "reward_end": 0.3,
        "policy_version": 2,
        "trajectories": 9,
        "trained": 4,
        "dropped": {"stale": 2},
        "dead_letters": 0,
        "lag_mean": 1.5,
        "lag_max": 3,
        "updates": 2,
        "pause_ms_p50": 5.0,
        "pause_ms_max": 5.0,
        "tokens_per_second": 200.0,
        "delta_bytes": 102,
        "full_bytes": 5000,
    }
    json.dumps(summary)


def test_nothing_done_is_a_summary_too() -> None:
    summary = History().summary(task="t", seed=0, seconds=1.0, started_ms=0)
    assert summary["reward_end"] is None and summary["lag_max"] == 0 and summary["tokens_per_second"] == 0.0


def test_an_engine_that_was_restarted_counts_on() -> None:
    history = History()
    for record in (
        status(3, updates=0, tokens=0, at_ms=0),
        status(4, updates=1, tokens=10, at_ms=1000),
        status(5, updates=2, tokens=60, at_ms=2000),
        status(-1, updates=0, tokens=0, at_ms=3000),
        status(6, updates=1, tokens=0, at_ms=4000),
        status(7, updates=2, tokens=50, at_ms=5000),
    ):
        history.add_engine(record)
    assert history.updates == 3 and history.tokens == 100


def test_tokens_that_are_taken_back_are_no_restart() -> None:
    history = History()
    for record in (
        status(0, updates=1, tokens=10, at_ms=0),
        status(0, updates=1, tokens=100, at_ms=1000),
        status(0, updates=1, tokens=95, at_ms=1100),
        status(1, updates=2, tokens=110, at_ms=2000),
    ):
        history.add_engine(record)
    assert history.updates == 1 and history.tokens == 100


def test_percentiles_by_nearest_rank() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([4, 1, 3, 2], 50) == 3


def test_a_run_is_done_by_reward_by_steps_or_by_time() -> None:
    history = History()
    goal = Goal(reward=0.9, steps=5, seconds=60.0, steps_suffice=False)
    history.add_weights(weights(1, 0.95))
    assert goal.reached(history, seconds=1, trained=False) is None, "one batch is no mean"
    assert "time limit" in (goal.reached(history, seconds=61, trained=False) or "")
    history.add_weights(weights(2, 0.95))
    assert "reward reached" in (goal.reached(history, seconds=1, trained=False) or "")
    assert goal.missed(history) is None
    history.add_weights(weights(3, 0.0))
    assert (history.reward or 1.0) < 0.9
    assert goal.missed(history) is None, "a step made while stopping takes nothing back"


def test_a_run_that_ended_short_of_its_reward_says_so() -> None:
    history = History()
    assert Goal().missed(history) == "no step was trained"
    history.add_weights(weights(4, 0.1))
    history.add_weights(weights(5, 0.1))
    assert "5 steps" in (Goal(steps=5).reached(history, seconds=0, trained=False) or "")
    assert Goal(reward=0.9, steps=5).missed(history) is None
    assert "0.100, not to 0.9" in (Goal(reward=0.9, steps_suffice=False).missed(history) or "")


def fates(**reasons: int) -> History:
    history = History()
    for reason, count in reasons.items():
        for _ in range(count):
            history.add_fate(None if reason == "admitted" else reason)
    return history


def test_a_run_in_which_every_rollout_is_void_is_ended_and_says_why(tmp_path: Path) -> None:
    log = tmp_path / "streams-0.log"
    log.write_text("x\nW void: rollout=r reason=reward_error KeyError: 'answer'\ny\n")

    def verdict(history: History, batch_size: int = 8, since_ms: int = 0) -> str | None:
        return hopeless(history, tmp_path, batch_size=batch_size, since_ms=since_ms)

    assert verdict(fates(void=63)) is None
    assert verdict(fates(void=64), batch_size=64) is None
    told = verdict(fates(void=64, eval=5)) or ""
    assert "first 64 rollouts are void" in told and str(log) in told and told.endswith("KeyError: 'answer'")
    assert verdict(fates(void=900, admitted=1)) is None
    assert verdict(fates(void=900, zero_variance=8)) is None, "these have rewards"
    trained = fates(void=64)
    trained.add_weights(weights(1, 0.5))
    assert verdict(trained) is None
    assert verdict(trained, since_ms=5000), "what an earlier start of the run has trained does not count"


def test_voids_are_told_with_the_log_that_has_their_cause(tmp_path: Path) -> None:
    assert voids_line(fates(void=2, admitted=1), tmp_path).startswith("2 of 3 rollouts so far are void: see ")
    (tmp_path / "streams-0.log").write_text("all is well\n")
    (tmp_path / "rollout-0.log").write_text(
        "W environment failed rollout=r\nTraceback (most recent call last):\n  x\nOSError: y\nz\n"
    )
    assert voids_line(fates(void=1), tmp_path).endswith("rollout-0.log")
    assert find_clue(tmp_path)[1].endswith("rollout=r\nOSError: y")
    history = fates(void=3, admitted=4)
    history.add_weights(weights(1, 0.5))
    assert progress_line(history, seconds=1.0).endswith("  void 3")


def test_a_run_samples_its_first_batch_and_then_trains() -> None:
    history = fates(admitted=5, stale=2)
    assert phase_text(history, batch_size=8, since_ms=0) == "sampling: 5 of 8 for the first batch"
    history.add_fate("void")
    assert phase_text(history, batch_size=8, since_ms=0).endswith("batch, 1 of 8 rollouts void")
    history.add_weights(weights(1, 0.5))
    assert phase_text(history, batch_size=8, since_ms=0) == "training"
    assert "sampling" in phase_text(history, batch_size=8, since_ms=2000), "that was an earlier start"


def test_an_ended_run_says_where_it_lies_and_how_to_go_on(tmp_path: Path) -> None:
    command = ["up", "-c", "my run.toml"]
    told = farewell(tmp_path, command)
    assert str(tmp_path) in told and PLOT not in told
    assert told.endswith("`headrace up -c 'my run.toml'` goes on from here")
    (tmp_path / PLOT).touch()
    assert str(tmp_path / PLOT) in farewell(tmp_path, command)
    assert "with more --steps goes on" in go_on(command, steps_done=True)


def test_a_sparkline_is_thinned_to_its_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(sparkline([0.1] * 500)) == 60
    assert sparkline([-1.0, 2.0]) == "▁█"


def test_the_plot_is_drawn_for_short_runs_too(tmp_path: Path) -> None:
    from headrace.deploy.plot import draw

    history = History()
    history.add_weights(weights(1, 0.5))
    draw(history, tmp_path / "plot.png", title="t")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_an_engine_between_updates_is_told_as_serving() -> None:
    from headrace.deploy.view import engine_word
    from headrace.schemas.engine import EngineState, EngineStatus

    def engine(state: EngineState, version: int) -> EngineStatus:
        return EngineStatus(engine_id="e", policy_id="p", state=state, version=version)

    assert engine_word(engine(EngineState.IDLE, 3)) == "serving"
    assert engine_word(engine(EngineState.IDLE, -1)) == "waiting for weights"
    assert engine_word(engine(EngineState.POISONED, 3)) == "poisoned"
