"""One role per command, for production and for the supervisor: they block until SIGTERM or Ctrl-C."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .options import ConfigOption, SetOption
from .settings import load

PANEL = "One role"


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    for command in (engine, streams, rollout, gateway, train):
        app.command(rich_help_panel=PANEL)(command)


def engine(
    config: ConfigOption = None,
    sets: SetOption = None,
    engine_id: Annotated[
        str, typer.Option("--id", help="Unique among the engines of a namespace.")
    ] = "engine-0",
    attach: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="engine.url: drive the vLLM server there (or SGLang, by engine.kind)."
        ),
    ] = None,
) -> None:
    """Sample tokens, and follow the policy's weights while doing so.

    engine.kind: transformers (the default) and vllm run in this process; vllm with engine.url, and sglang, drive the
    server there. `headrace doctor` says whether the kind that is configured can run here.
    """
    # A kind that is given beside it wins.
    server = [] if attach is None else ["engine.kind=vllm", f"engine.url={attach}"]
    _run("headrace.producers.engines.role", config, [*server, *(sets or ())], engine_id)


def streams(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Verify trajectories, compute advantages, drop what is stale (Faust)."""
    _run("headrace.streams.worker", config, sets or ())


def rollout(
    config: ConfigOption = None,
    sets: SetOption = None,
    worker_id: Annotated[
        str, typer.Option("--id", help="Unique among the workers of a namespace.")
    ] = "rollout-0",
) -> None:
    """Play tasks against an engine and publish the trajectories."""
    _run("headrace.producers.rollout.worker", config, sets or (), worker_id)


def gateway(
    config: ConfigOption = None,
    sets: SetOption = None,
    gateway_id: Annotated[
        str, typer.Option("--id", help="Unique among the gateways of a namespace.")
    ] = "gateway-0",
    new_key: Annotated[
        str | None,
        typer.Option(
            metavar="TENANT", help="Make an API key: print it, and its entry for gateway.keys_file, and end."
        ),
    ] = None,
) -> None:
    """Serve agent harnesses: every conversation becomes trajectories."""
    if new_key is not None:
        from ..producers.gateway.keys import make_key

        key, entry = make_key(new_key)
        typer.echo(key)
        typer.echo(entry, err=True)
        return
    _run("headrace.producers.gateway.role", config, sets or (), gateway_id)


def train(
    config: ConfigOption = None,
    sets: SetOption = None,
    refuse: Annotated[
        bool, typer.Option("--refuse", help="End if a trainer is at work already; else this one takes over.")
    ] = False,
) -> None:
    """Train on the samples topic and publish every version's weights."""
    second = ["trainer.second=refuse"] if refuse else []
    _run("headrace.consumers.trainer.role", config, [*(sets or ()), *second])


def _run(module: str, path: Path | None, sets: Sequence[str], *args: str) -> None:
    loaded = load(path, sets)
    if path is not None:
        sys.path.append(str(path.resolve().parent))
    configure_logging()
    status = importlib.import_module(module).main(loaded, *args)
    raise typer.Exit(status or 0)


def configure_logging() -> None:
    """Standard error, one line a record; HEADRACE_LOG_LEVEL chooses the level."""
    logging.basicConfig(
        level=os.environ.get("HEADRACE_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
        force=True,
    )
    for noisy in ("kafka", "aiokafka", "faust", "mode", "urllib3", "httpx", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It complains of every callback that a busy machine delays.
    logging.getLogger("kafka.net.selector").setLevel(logging.ERROR)
