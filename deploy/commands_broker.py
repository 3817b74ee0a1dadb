"""`headrace broker`: fetch a release of Apache Kafka; run a broker here, or start, stop and look at one in the background."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, KafkaHomeOption, print_json
from .settings import FLAGS

if TYPE_CHECKING:
    from ..schemas.config import KafkaConfig
    from .broker.background import Status

KindOption = Annotated[str, typer.Option(help="auto, embedded or kafka.")]
PortOption = Annotated[int | None, typer.Option(min=1, max=65535, help="Of the first node; else a free one.")]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Its folder; else broker/ in headrace's data folder.")
]


def add_to(app: typer.Typer) -> None:
    """Register the group."""
    broker = typer.Typer(no_args_is_help=True, help="Apache Kafka for this machine: fetch it, run it.")
    for command in (fetch, run, start, stop, status):
        broker.command(command.__name__)(command)
    app.add_typer(broker, name="broker", rich_help_panel="Run")


def fetch(
    version: Annotated[
        str | None, typer.Option(help="Of Apache Kafka; else the one headrace is tested with.")
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE|FOLDER|URL",
            help="An archive, an unpacked release or a mirror; else Apache's sites.",
        ),
    ] = None,
    sha512: Annotated[
        str | None, typer.Option(metavar="HEX", help="Of the archive, where none is published beside it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch Apache Kafka into your data folder; runs use it from then on."""
    from .broker_fetching import fetch_shown

    fetch_shown(version, origin, sha512, as_json=as_json)


def run(
    data_dir: Annotated[Path, typer.Option(help="Where its records lie.")] = Path("runs/broker"),
    port: PortOption = None,
    kind: KindOption = "auto",
    kafka_home: KafkaHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a broker on loopback and keep it until Ctrl-C."""
    from .broker.launcher import choose_kind, start_broker
    from .broker_foreground import serve

    chosen, found = choose_kind(_config(kind, kafka_home))
    serve(lambda: start_broker(chosen, data_dir, found, port=port), as_json=as_json)


def start(
    nodes: Annotated[int | None, typer.Option(help="1 or 3; three survive the loss of any one.")] = None,
    port: PortOption = None,
    data: DataOption = None,
    kind: KindOption = "auto",
    kafka_home: KafkaHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a broker in the background, or what died of it. It outlives this command."""
    from ..schemas.errors import ConfigError
    from .broker import background
    from .interrupts import Interrupts

    if nodes not in (None, 1, 3):
        raise ConfigError(f"--nodes {nodes}: 1, or 3 that survive the loss of any one")
    with Interrupts():
        found, started = background.start(_folder(data), _config(kind, kafka_home), nodes=nodes, port=port)
    if as_json:
        print_json(found.as_json() | {"started": started})
        return
    what = (
        "runs already"
        if not started
        else "started"
        if len(started) == len(found.nodes)
        else "back: " + ", ".join(started)
    )
    _show(found, what)
    sets = "".join(f" --set {key}={value}" for key, value in found.settings.items())
    typer.echo(f"use it: headrace up --bootstrap {found.bootstrap}{sets}")


def stop(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Stop the broker in the background. Its records stay."""
    from .broker import background

    stopped = background.stop(_folder(data))
    if as_json:
        print_json({"stopped": stopped})
    else:
        typer.echo(f"stopped: {', '.join(stopped)}" if stopped else "no broker runs")


def status(data: DataOption = None, as_json: JsonOption = False) -> None:
    """Show the broker in the background. Exit status 0 while it runs, 1 otherwise."""
    from .broker import background

    found = background.status(_folder(data))
    if as_json:
        print_json(found.as_json())
    elif found.kind is None:
        typer.echo(f"no broker was started in {found.data}; `headrace broker start` starts one")
    else:
        up = sum(node.up for node in found.nodes)
        all_up = up == len(found.nodes)
        _show(found, "running" if all_up else f"{up} of {len(found.nodes)} up" if up else "not running")
        if not all_up:
            typer.echo(
                "`headrace broker start` brings it back" if up else "`headrace broker start` starts it again"
            )
    raise typer.Exit(0 if found.running else 1)


def _folder(data: Path | None) -> Path:
    from .broker.data_dir import data_dir

    return data if data is not None else data_dir() / "broker"


def _config(kind: str, kafka_home: Path | None) -> KafkaConfig:
    from ..schemas.config_file import load_config

    home = str(kafka_home.resolve()) if kafka_home is not None else None
    return load_config(overrides={"kafka.broker": kind, "kafka.kafka_home": home}, flags=FLAGS).kafka


def _show(found: Status, what: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from .broker.choice import short

    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{found.title}: {what}")
    mib = found.bytes_on_disk / 2**20
    console.print(f"  bootstrap  {found.bootstrap}\n  data       {short(found.data)} ({mib:.1f} MiB)")
    table = Table(box=None, pad_edge=False, show_header=False)
    for node in found.nodes:
        state = "[green]up[/]" if node.up else "[red]down[/]"
        more = f"process {node.pid}, {_span(node.uptime_s)}" if node.up else f"log {short(Path(node.log))}"
        table.add_row(f"  {node.name}", node.address, state, more)
    console.print(table)


def _span(seconds: float | None) -> str:
    minutes, rest = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
