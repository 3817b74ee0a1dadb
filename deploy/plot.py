"""The plot at the end of a run: reward, lag, pauses, bytes, over the policy versions."""

from __future__ import annotations

from pathlib import Path

from .history import History


def draw(history: History, path: Path, *, title: str) -> None:
    """Write a PNG with four panels to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    versions = [s.version for s in history.steps]
    figure = Figure(figsize=(10, 7), layout="constrained")
    reward, lag, pause, size = figure.subplots(2, 2).flatten()
    reward.plot(versions, [s.reward_mean for s in history.steps], alpha=0.35, label="batch mean")
    reward.plot(versions, [s.reward_ema for s in history.steps], label="exponential mean 0.9")
    reward.set(title="reward (verifier, temperature 1)", ylim=(-0.02, 1.02))
    lag.plot(versions, [s.lag_mean for s in history.steps], label="mean")
    lag.plot(versions, [s.lag_max for s in history.steps], alpha=0.5, label="max")
    lag.set(title="lag of trained samples (versions)")
    pause.plot(history.pauses_ms, ".", markersize=4, label="one update")
    pause.set(title="engine pause (ms)", xlabel="update", ylim=(0, None))
    size.plot(versions, [s.delta_bytes / 1024 for s in history.steps], label="delta")
    size.axhline(history.full_bytes / 1024, linestyle="--", color="gray", label="all weights")
    size.set(title="bytes per version (KiB)", xlabel="policy version", ylim=(0, None))
    for axes in (reward, lag, size):
        axes.set_xlabel("policy version")
    for axes in (reward, lag, pause, size):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
