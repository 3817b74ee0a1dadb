"""Commands that look at a run or at this machine: topics, status, top, deadletters, doctor."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import commands_letters
from .options import ConfigOption, JsonOption, RunDirOption, SetOption, print_json
from .settings import load, load_running, require_reachable

PANEL = "Look"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    topics = typer.Typer(no_args_is_help=True, help="Create or list the topics of a namespace.")
    topics.command("create")(topics_create)
    topics.command("ls")(topics_ls)
    app.add_typer(topics, name="topics", rich_help_panel=PANEL)
    letters = typer.Typer(no_args_is_help=True, help="Records that no stage could use.")
    commands_letters.add_to(letters)
    app.add_typer(letters, name="deadletters", rich_help_panel=PANEL)
    for command in (status, top, doctor):
        app.command(rich_help_panel=PANEL)(command)


def topics_create(config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """Create the topics that are missing."""
    from ..schemas.topics import Topics
    from ..streams.kafka import create_topics

    loaded = load_running(config, None, sets or ())
    require_reachable(loaded)
    created = create_topics(loaded.kafka, Topics(loaded.run.namespace), [loaded.policy.id])
    if as_json:
        print_json({"created": created})
    else:
        typer.echo("\n".join(f"created {name}" for name in created) or "all topics exist")


def topics_ls(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the topics of the namespace with their partitions and records."""
    from .topic_list import list_topics

    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    found = list_topics(loaded)
    if as_json:
        print_json({"topics": [t.as_json() for t in found]})
        return
    _table(
        ["topic", "partitions", "records", "kept from"],
        [[t.name, t.partitions, t.records if t.exists else "missing", t.first_offset] for t in found],
    )


def status(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where every stage is: position, lag in records, oldest age, version; restarts of a local run's roles."""
    from ..streams.status import snapshot
    from .restart_file import read_restarts

    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    found, restarts = snapshot(loaded), read_restarts(loaded.run.dir)
    if as_json:
        print_json(found.as_json() | {"restarts": restarts})
        return
    from rich.console import Console

    from .view import status_view

    Console().print(status_view(found, restarts))


def top(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
) -> None:
    """`status`, live, until Ctrl-C."""
    import time

    from rich.live import Live

    from ..streams.status import snapshot
    from .interrupts import Interrupted, Interrupts
    from .restart_file import read_restarts
    from .view import status_view

    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    with Interrupts():
        try:
            with Live(
                status_view(snapshot(loaded), read_restarts(loaded.run.dir)), auto_refresh=False, screen=False
            ) as live:
                while True:
                    live.update(status_view(snapshot(loaded), read_restarts(loaded.run.dir)), refresh=True)
                    time.sleep(every)
        except Interrupted:
            raise typer.Exit from None


def doctor(config: ConfigOption = None, sets: SetOption = None, as_json: JsonOption = False) -> None:
    """Check this machine: Python, brokers, Java, model, ports, versions. Exit status 1 if something is missing."""
    from .doctor import diagnose

    findings = diagnose(load(config, sets or ()))
    if as_json:
        print_json(
            {"ok": all(f.level != "error" for f in findings), "checks": [f.as_json() for f in findings]}
        )
    else:
        _table(["", "check", "found"], [[f.level, f.check, f.detail] for f in findings])
    raise typer.Exit(1 if any(f.level == "error" for f in findings) else 0)


def _table(columns: list[str], rows: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    Console().print(table if rows else "none")
