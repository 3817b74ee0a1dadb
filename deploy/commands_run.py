"""Commands that start something: demo, up, init."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .options import BootstrapOption, ConfigOption, JsonOption, KafkaHomeOption, SetOption, print_json
from .settings import load, parse_sets

PANEL = "Run"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (demo, up, init):
        app.command(rich_help_panel=PANEL)(command)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    task: Annotated[
        str, typer.Option(help="calculator (two turns with a tool) or addition (one turn).")
    ] = "calculator",
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Train so many steps, whatever the reward; else until it is high."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; else a new one under ./runs.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="transformers, or vllm where that is installed (deploy/vllm/install).")
    ] = None,
    bootstrap: BootstrapOption = None,
    kafka_home: KafkaHomeOption = None,
    sets: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """The whole loop on one machine, from nothing, with a live view."""
    from .demo import demo as run_demo
    from .running import show

    summary = run_demo(
        task=task,
        seed=seed,
        steps=steps,
        target=None,
        run_dir=run_dir,
        bootstrap=bootstrap,
        kafka_home=kafka_home,
        overrides=parse_sets(sets or ()),
        quiet=as_json,
        engine=engine,
    )
    show(summary, quiet=as_json)
    if as_json:
        print_json(summary)


def up(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: Annotated[Path | None, typer.Option(help="Overrides run.dir.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Overrides trainer.steps.")] = None,
    bootstrap: BootstrapOption = None,
    kafka_home: KafkaHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """The same stack for your own model, tasks and rewards. Ctrl-C ends it."""
    from .interrupts import Interrupted
    from .running import farewell, go_on, show
    from .settings import DEFAULT_FILE
    from .up import up as run_up

    loaded = load(
        config,
        sets or (),
        overrides={
            "run.dir": str(run_dir) if run_dir is not None else None,
            "trainer.steps": steps,
            "kafka.bootstrap": bootstrap,
            "kafka.kafka_home": str(kafka_home.resolve()) if kafka_home is not None else None,
        },
    )
    folder = (config or DEFAULT_FILE).resolve().parent
    run = loaded.run.dir.resolve()
    try:
        summary = run_up(loaded, plugin_path=list(dict.fromkeys([folder, Path.cwd()])), quiet=as_json)
    except Interrupted:
        typer.echo(farewell(run, sys.argv[1:]), err=True)
        raise
    show(summary, quiet=as_json)
    typer.echo(go_on(sys.argv[1:], steps_done=True), err=as_json)
    if as_json:
        print_json(summary)


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write.")] = Path("."),
    as_json: JsonOption = False,
) -> None:
    """Write a commented headrace.toml, a small task file and an example reward."""
    from .init import write_templates

    written = write_templates(directory)
    if as_json:
        print_json({"written": [str(p) for p in written]})
        return
    for path in written:
        typer.echo(f"wrote {path}")
    typer.echo("next: set policy.model in headrace.toml, then `headrace up`")
