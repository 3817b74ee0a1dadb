"""`headrace audit`: does what the log says add up."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import ConfigOption, JsonOption, RunDirOption, SetOption, print_json
from .settings import load_running, require_reachable

if TYPE_CHECKING:
    from .audit import AuditResult
    from .audit_log import GroupLag

PANEL = "Look"
LEDGER_VARIABLE = "HEADRACE_ACK_LEDGER"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(rich_help_panel=PANEL)(audit)


def audit(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Ids that producers wrote down when Kafka acknowledged them (HEADRACE_ACK_LEDGER of the run)."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Account for every trajectory: trained once, dropped and why, void, dead-lettered; exit status 1 where not."""
    from .audit_log import group_lags, run_audit

    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    if ledger is None and os.environ.get(LEDGER_VARIABLE):
        ledger = Path(os.environ[LEDGER_VARIABLE])
    if ledger is not None and not ledger.is_file():
        raise typer.BadParameter(f"{ledger} is not a file", param_hint="--ledger")
    found = run_audit(loaded, ledger=ledger, tell=lambda text: typer.echo(text, err=True))
    lags = group_lags(loaded)
    if as_json:
        print_json(as_dict(found, lags))
    else:
        _show(found, lags)
    raise typer.Exit(0 if found.adds_up else 1)


def as_dict(found: AuditResult, lags: list[GroupLag]) -> dict[str, Any]:
    """Plain values for `json.dumps`."""
    return {
        **dataclasses.asdict(found),
        "in_flight": found.in_flight,
        "adds_up": found.adds_up,
        "groups": [dataclasses.asdict(lag) for lag in lags],
    }


def _show(found: AuditResult, lags: list[GroupLag]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("trajectories", "", box=None, pad_edge=False, header_style="bold")
    table.columns[1].justify = "right"
    rows: list[tuple[str, int]] = [("acknowledged", found.acknowledged), ("  trained", found.trained)]
    rows += [(f"  dropped: {why}", n) for why, n in sorted(found.reasons.items()) if why != "void"]
    rows += [("  void", found.void), ("  dead-lettered", found.deadlettered)]
    rows += [(f"  on the way to {stage}", n) for stage, n in sorted(found.waiting.items())]
    rows += [("  lost", found.lost), ("trained twice", found.trained_twice)]
    rows += [("newest version", found.versions), ("versions missing", found.version_gaps)]
    if found.ledger is not None:
        rows.insert(1, ("  told to producers", found.ledger))
    for name, count in rows:
        table.add_row(name, f"{count:,}")
    groups = Table("consumer group", "topic", "lag", box=None, pad_edge=False, header_style="bold")
    for lag in lags:
        groups.add_row(lag.group, lag.topic, f"{lag.lag:,}")
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(groups)
    for note in found.notes:
        console.print(f"note: {note}", style="yellow", markup=False)
    for problem in found.problems:
        console.print(f"does not add up: {problem}", style="bold red", markup=False)
    if found.adds_up:
        console.print("all of it adds up", style="green")
