"""Options that many commands share, and what they print with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option("-c", "--config", help="TOML or JSON file; without it ./headrace.toml, where there is one."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as trainer.lr=1e-5. Repeatable."),
]
RunDirOption = Annotated[Path | None, typer.Option(help="The folder of a run on this machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
BootstrapOption = Annotated[
    str | None, typer.Option(help="host:port of a running Kafka; without it one is started.")
]
KafkaHomeOption = Annotated[
    Path | None,
    typer.Option(
        help="An unpacked Apache Kafka release to start (else KAFKA_HOME, else a fetched one, else embedded)."
    ),
]


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def print_error(message: str) -> None:
    """One clear message on standard error, red in a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), (message, "red")))
