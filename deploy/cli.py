"""The `headrace` command. Heavy imports happen inside the commands, so that `--help` answers at once.

Errors that headrace raises on purpose are one message without a traceback: exit status 2 for what the user
configured, 3 for a fenced trainer, 1 for the rest.
"""

from __future__ import annotations

import os
import sys

import typer

from ..schemas.errors import ConfigError, FencedError, HeadraceError
from . import (
    commands_audit,
    commands_bench,
    commands_broker,
    commands_feedback,
    commands_inspect,
    commands_roles,
    commands_run,
    commands_weights,
)
from .interrupts import Interrupted
from .options import print_error
from .restarts import CONFIG, FENCED

PLUGIN_PATH = "HEADRACE_PLUGIN_PATH"
"""Folders in which `module:attr` plug-ins are looked for, behind everything that is installed."""

app = typer.Typer(
    name="headrace",
    help="Online reinforcement learning for LLM agents, built on a log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


commands_run.add_to(app)
commands_broker.add_to(app)
commands_inspect.add_to(app)
commands_roles.add_to(app)
commands_feedback.add_to(app)
commands_bench.add_to(app)
commands_audit.add_to(app)
commands_weights.add_to(app)


def main() -> None:
    """Entry point of the console script."""
    # At the end: a user's module must never hide an installed one.
    sys.path += [p for p in (*os.environ.get(PLUGIN_PATH, "").split(os.pathsep), os.getcwd()) if p]
    try:
        app()
    except HeadraceError as e:
        print_error(str(e))
        sys.exit(CONFIG if isinstance(e, ConfigError) else FENCED if isinstance(e, FencedError) else 1)
    except Interrupted as e:
        sys.exit(e.exit_status)
    except Exception as e:
        if not _from_kafka(e):
            raise
        print_error(
            f"Kafka: {type(e).__name__}: {e}: is the broker up? `headrace broker status`, `headrace status`"
        )
        sys.exit(1)


def _from_kafka(error: Exception) -> bool:
    # Looked up where it is loaded already: importing it here would cost every `--help` a moment.
    errors = sys.modules.get("kafka.errors")
    return errors is not None and isinstance(error, errors.KafkaError)


if __name__ == "__main__":
    main()
