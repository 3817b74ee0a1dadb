"""`headrace bench`: figures of speed and size, and what survives being killed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import BootstrapOption, JsonOption, KafkaHomeOption, print_json

PANEL = "Look"


def add_to(app: typer.Typer) -> None:
    """Register the group."""
    bench = typer.Typer(
        help="Measure: speeds beside a yardstick of the same run.", no_args_is_help=True, add_completion=False
    )
    bench.command()(streams)
    bench.command()(chaos)
    bench.command()(delta)
    bench.command()(pause)
    app.add_typer(bench, name="bench", rich_help_panel=PANEL)


def streams(
    records: Annotated[int, typer.Option(min=1000, help="Rollouts in a run.")] = 24_000,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind; medians count.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Workers of the last run.")] = 3,
    partitions: Annotated[int, typer.Option(min=1)] = 6,
    memory: Annotated[
        int, typer.Option(min=0, help="Instead: resident set over this many scores, such as 1000000.")
    ] = 0,
    bootstrap: BootstrapOption = None,
    kafka_home: KafkaHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """The processors' throughput beside a bare pass-through of the same records, and the decoder's."""
    from .bench.decoding import decode_mb_s
    from .bench.streams import Bench, Load

    load = Load(records=records, rounds=rounds, partitions=partitions)
    with _broker(bootstrap, kafka_home) as (kafka, title, one_worker), _folder() as folder:
        _say(f"broker: {title}")
        bench = Bench(kafka, folder, load, _say)
        if memory:
            found = bench.memory(total=memory, every=max(1000, memory // 10))
        else:
            found = {**bench.run(workers=1 if one_worker else workers), **decode_mb_s()}
        found["broker"] = title
    _show(found, as_json)


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long processes are killed.")] = 5.0,
    kills: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    seed: Annotated[int, typer.Option(help="Of who is hurt when.")] = 0,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="A new folder for the run; kept. Else a temporary one, kept on failure."),
    ] = None,
    kafka_home: KafkaHomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Kill -9 of random roles and broker nodes under the whole loop; then the books must balance, else status 1."""
    import shutil

    from .bench.chaos import Trial
    from .bench.chaos import chaos as run

    folder = run_dir or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    trial = Trial(run_dir=folder, seconds=minutes * 60, kills=kills, seed=seed, kafka_home=kafka_home)
    try:
        found = run(trial, _say)
    except BaseException:
        _say(f"the run is kept in {folder}")
        raise
    if run_dir is None and found["passed"]:
        shutil.rmtree(folder)
        del found["run_dir"]
    _show(found, as_json)
    for problem in found["problems"]:
        _say(f"does not add up: {problem}")
    raise typer.Exit(0 if found["passed"] else 1)


def pause(
    engine: Annotated[list[str] | None, typer.Option(help="transformers, vllm; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Updates of each kind; medians count.")] = 5,
    changed: Annotated[float, typer.Option(min=0.0001, max=1.0, help="Part of each tensor.")] = 0.01,
    as_json: JsonOption = False,
) -> None:
    """An update of a 191M-parameter model in a running engine: the write beside a copy, the pause beside a full load."""
    from .bench.pause import PauseLoad, measure

    found: dict[str, Any] = {}
    with _folder() as folder:
        for kind in engine or ["transformers"]:
            found |= measure(kind, folder, PauseLoad(rounds=rounds, changed=changed), _say)
    _show(found, as_json)


def delta(
    params: Annotated[int, typer.Option(min=1, help="Parameters, in tensors of 4 Mi.")] = 1 << 26,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each kind; the best counts.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the figures by the clock on the wall.")] = 2,
    steps: Annotated[
        int, typer.Option(min=0, help="AdamW steps of the fine-tune at lr 1e-6; 0: none.")
    ] = 100,
    as_json: JsonOption = False,
) -> None:
    """Weight deltas: bytes a parameter beside the entropy and PULSE's format, speeds a core, memory, a fine-tune."""
    from .bench.delta import measure

    found = measure(params=params, repeats=repeats, threads=threads, say=_say)
    if steps:
        from .bench.finetune import finetune

        _say(f"{steps} AdamW steps")
        found |= finetune(steps=steps, lr=1e-6)
    _show(found, as_json)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        yield Path(name)


@contextlib.contextmanager
def _broker(bootstrap: str | None, kafka_home: Path | None) -> Iterator[tuple[Any, str, bool]]:
    """Where the bench runs: (configuration, what it is, whether one worker is all it takes)."""
    from ..schemas.config import KafkaConfig
    from .broker.launcher import choose_kind, start_broker

    if bootstrap is not None:
        yield KafkaConfig(bootstrap=bootstrap), f"the Kafka at {bootstrap}", False
        return
    kind, home = choose_kind(KafkaConfig(kafka_home=kafka_home))
    with _folder() as folder, start_broker(kind, folder, home) as broker:
        yield broker.config, broker.limits.title, broker.limits.max_workers == 1


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", "value", box=None)
    for name, value in found.items():
        table.add_row(
            name, "-" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
        )
    Console(soft_wrap=True).print(table)
