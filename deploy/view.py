"""What people see: the live view of a run, progress lines where there is no terminal, the status table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ..schemas.engine import EngineState, EngineStatus
from ..streams.status import Status
from .history import History
from .restart_file import Counts, restarts_text
from .restarts import RestartCause
from .supervisor import Role

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60


def sparkline(
    values: Sequence[float], *, width: int = SPARK_WIDTH, low: float = 0.0, high: float = 1.0
) -> str:
    """Block characters between `low` and `high`; longer series are thinned to `width`."""
    if not values:
        return ""
    picked = values if len(values) <= width else [values[i * len(values) // width] for i in range(width)]
    span = (high - low) or 1.0
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[min(top, max(0, round((v - low) / span * top)))] for v in picked)


def run_view(
    title: str, history: History, roles: Sequence[Role], *, seconds: float, phase: str
) -> RenderableType:
    """The live view of a run that this process started."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, value in _facts(history, seconds, phase):
        facts.add_row(name, value)
    processes = Table("process", "state", "restarts", box=None, pad_edge=False, header_style="dim")
    for role in roles:
        style = {"running": "green", "failed": "bold red", "waiting": "yellow"}.get(role.state, "dim")
        processes.add_row(role.spec.name, Text(role.state, style=style), _restarts(role))
    return Panel(Group(facts, "", processes), title=title, title_align="left")


def _restarts(role: Role) -> str:
    stalled = role.restarts.causes[RestartCause.STALLED]
    return f"{role.restarts.total}" + (f" ({stalled} stalled)" if stalled else "")


def _facts(history: History, seconds: float, phase: str) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [("time", f"{seconds:.0f} s   {phase}")]
    if history.steps:
        last = history.steps[-1]
        curve = Text(sparkline([s.reward_ema for s in history.steps]), style="cyan")
        rows += [
            ("reward", f"{last.reward_ema:.3f}  (last batch {last.reward_mean:.3f})"),
            ("", curve),
            ("version", f"{last.version}   trained {history.trained} of {history.trajectories} trajectories"),
            ("lag", f"mean {last.lag_mean:.2f}  max {last.lag_max:.0f}"),
        ]
    else:
        rows.append(("version", "-" if history.version is None else str(history.version)))
        rows.append(("trajectories", str(history.trajectories)))
    if history.dropped:
        rows.append(("dropped", "  ".join(f"{k} {v}" for k, v in sorted(history.dropped.items()))))
    if history.voids:
        rows.append(("void", Text(f"{history.voids} of {history.fated} rollouts", style="yellow")))
    if history.dead_letters:
        rows.append(("dead letters", Text(str(history.dead_letters), style="yellow")))
    for engine in history.engines.values():
        pause = "" if engine.pause_ms is None else f"  pause {engine.pause_ms:.1f} ms"
        rows.append(
            (
                engine.engine_id,
                f"{engine_word(engine)}  version {engine.version}  {engine.running} requests{pause}  "
                f"{history.tokens_per_second:.0f} tokens/s",
            )
        )
    return rows


def engine_word(engine: EngineStatus) -> str:
    """What people are told of an engine: between updates it is idle in following the weights, not in serving."""
    if engine.held and engine.state not in (EngineState.POISONED, EngineState.STOPPED):
        return "paused by an operator"
    if engine.state is not EngineState.IDLE:
        return engine.state.value
    return "serving" if engine.version >= 0 else "waiting for weights"


def phase_text(history: History, *, batch_size: int, since_ms: int) -> str:
    """What a started run is doing: filling its first batch, or training."""
    if history.trained_since(since_ms):
        return "training"
    voids = f", {history.voids} of {history.fated} rollouts void" if history.voids else ""
    return f"sampling: {min(history.admitted, batch_size)} of {batch_size} for the first batch{voids}"


def progress_line(history: History, *, seconds: float) -> str:
    """One line for a log: the newest step."""
    last = history.steps[-1]
    void = f"  void {history.voids}" if history.voids else ""
    return (
        f"{seconds:6.1f} s  version {last.version:4d}  reward {last.reward_mean:.3f}  mean {last.reward_ema:.3f}  "
        f"lag {last.lag_mean:.2f}/{last.lag_max:.0f}  {history.tokens_per_second:.0f} tokens/s{void}"
    )


def status_view(status: Status, restarts: Counts | None = None) -> RenderableType:
    """`headrace status` for people; `restarts` of the roles, where the run is on this machine."""
    stages = Table(
        "stage", "position", "lag", "oldest", "version", box=None, pad_edge=False, header_style="bold"
    )
    for s in status.stages:
        lag = Text(str(s.lag_records), style="yellow" if s.oldest_age_s > 10 else "")
        stages.add_row(
            s.stage,
            str(s.position),
            lag,
            f"{s.oldest_age_s:.1f} s",
            "-" if s.version is None else str(s.version),
        )
    engines = Table(
        "engine",
        "state",
        "version",
        "running",
        "updates",
        "pause",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for e in status.engines:
        pause = "-" if e.pause_ms is None else f"{e.pause_ms:.1f} ms"
        version = f"{e.version} ({e.behind} behind)" if e.behind else str(e.version)
        engines.add_row(e.engine_id, engine_word(e), version, str(e.running), str(e.updates), pause)
    head = f"{status.namespace} / {status.policy_id} at {status.bootstrap}: version "
    head += "none yet" if status.version is None else f"{status.version}, {status.version_age_s:.1f} s old"
    parts: list[RenderableType] = [
        head,
        "",
        stages,
        "",
        engines if status.engines else "no engine has reported",
    ]
    if status.metrics:
        parts += ["", "  ".join(f"{k} {v:.4g}" for k, v in status.metrics.items())]
    if restarts:
        parts += ["", "restarts", *(Text(f"  {line}", style="yellow") for line in restarts_text(restarts))]
    if status.dead_letters:
        parts += ["", Text(f"{status.dead_letters} dead letters: headrace deadletters ls", style="yellow")]
    return Group(*parts)


def summary_table(summary: dict[str, object]) -> RenderableType:
    """The end of a run."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")  # paths stay whole
    for name, value in summary.items():
        shown = (
            ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
            if isinstance(value, dict)
            else str(value)
        )
        table.add_row(name.replace("_", " "), shown)
    return table
