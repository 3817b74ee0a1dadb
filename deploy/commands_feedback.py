"""`headrace feedback send`: outcomes of rollouts, one by options or many as JSON Lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import ConfigOption, JsonOption, RunDirOption, SetOption, print_json
from .settings import load_running, require_reachable

PANEL = "Look"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    feedback = typer.Typer(no_args_is_help=True, help="Outcomes that come after a rollout.")
    feedback.callback()(_group)
    feedback.command("send")(feedback_send)
    app.add_typer(feedback, name="feedback", rich_help_panel=PANEL)


def _group() -> None:
    """Outcomes that come after a rollout: accepted, edited, tests passed, thumbs."""


def feedback_send(
    rollout: Annotated[str | None, typer.Option(help="The rollout_id.")] = None,
    name: Annotated[
        str, typer.Option(help="The signal; `reward` replaces every other part of the reward.")
    ] = "reward",
    value: Annotated[float | None, typer.Option(help="A finite number.")] = None,
    event_time: Annotated[
        str | None,
        typer.Option(help="When it happened: Unix milliseconds, or ISO 8601 with its zone; else now."),
    ] = None,
    metadata: Annotated[str | None, typer.Option(help="JSON to keep with it.")] = None,
    feedback_id: Annotated[
        str | None, typer.Option("--id", help="Events with equal ids are one; else made up.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            help="JSON Lines with rollout, name, value, event_time, metadata, id; `-`: standard input.",
        ),
    ] = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send what became of a rollout. Wrong input is refused as a whole, before anything is sent."""
    from ..schemas.errors import ConfigError
    from .feedback_input import feedback_of, read_lines, send_all

    if file is not None:
        if rollout is not None or value is not None:
            raise ConfigError("--file brings its own rollouts and values: leave --rollout and --value away")
        events = read_lines(file)
    elif rollout is None or value is None:
        raise ConfigError(
            "give --rollout and --value, or many as JSON Lines with --file (`-`: standard input)"
        )
    else:
        row = {"rollout": rollout, "name": name, "value": value, "event_time": event_time, "id": feedback_id}
        events = [feedback_of(row | {"metadata": metadata}, where="the options")]
    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    send_all(loaded, events)
    if as_json:
        print_json({"sent": len(events), "feedback_ids": [f.feedback_id for f in events]})
    else:
        typer.echo(f"sent {len(events)} {'outcome' if len(events) == 1 else 'outcomes'}")
        if not loaded.feedback.on:
            typer.echo("nothing waits for them: set feedback.enabled = true (or feedback.signals)", err=True)
    for name in sorted({f.name for f in events} - loaded.feedback.names) if loaded.feedback.on else ():
        known = ", ".join(sorted(loaded.feedback.names))
        typer.echo(f"no reward reads the signal {name!r}, it is kept only; known: {known}", err=True)
