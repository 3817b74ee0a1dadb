"""`headrace weights`: ls, verify, compact, gc, export."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..schemas.errors import ConfigError
from .options import ConfigOption, JsonOption, RunDirOption, SetOption, print_json

if TYPE_CHECKING:
    from ..schemas.config import Config
    from ..streams.blobs import BlobStore
    from .weights_log import Catalog

PANEL = "Look"
Version = Annotated[int | None, typer.Option("--version", min=0, help="The version; the newest without it.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    group = typer.Typer(
        no_args_is_help=True, help="The versions of a policy: list, check, compact, clean up, export."
    )
    for command in (ls, verify, compact, gc, export):
        group.command()(command)
    app.add_typer(group, name="weights", rich_help_panel=PANEL)


def ls(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """List versions: what each consists of, its bytes, how much of a full copy that is, its hash, what is missing."""
    from .weights_table import version_rows, versions_table

    _, _, catalog = _open(config, run_dir, sets)
    rows = version_rows(catalog)
    shown = rows[-limit:]
    if as_json:
        jumps = [
            {"from": j.base_version, "to": j.version, "bytes": j.blobs[0].size, "name": j.blobs[0].uri}
            for j in catalog.jumps
        ]
        print_json({"versions": [dataclasses.asdict(r) for r in shown], "compacted": jumps})
        return
    from rich.console import Console

    Console().print(versions_table(shown))
    for jump in catalog.jumps:
        typer.echo(f"compacted: {jump.base_version} to {jump.version}, {jump.blobs[0].size:,} bytes")
    if len(rows) > len(shown):
        typer.echo(f"{len(rows) - len(shown)} older ones are not shown: --limit {len(rows)}")


def verify(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch and check every blob, and follow the weights from the oldest anchor on; exit status 1 if anything is wrong.

    Needs the memory of two copies of the model. An anchor and the deltas before it must lead to the same bits.
    """
    from .weights_verify import verify as check

    _, store, catalog = _open(config, run_dir, sets)
    with _progress("checking", len(catalog.records), as_json) as done:
        found = check(catalog, store, done=done)
    if as_json:
        print_json(dataclasses.asdict(found) | {"ok": found.ok})
    else:
        typer.echo(
            f"{found.versions} versions, {found.blobs} blobs with {found.bytes:,} bytes read and equal to their hashes\n"
            f"{found.chained} versions put together with the hash of their record; {found.anchors} anchors, "
            f"{found.both_ways} of them reached by deltas too, with the same bits\n"
            f"{found.collected} blobs were collected and are not needed"
        )
        for problem in found.problems:
            typer.secho(problem, fg="red", err=True)
        typer.echo("all is well" if found.ok else f"{len(found.problems)} problems")
    raise typer.Exit(0 if found.ok else 1)


def compact(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    first: Annotated[
        int | None,
        typer.Option("--from", min=0, help="The version to go on from; the newest anchor without it."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", min=1, help="The version to arrive at; the newest without it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one delta that stands for many: who joins late, or exports, fetches an anchor and one delta, not dozens.

    Only the trainer writes to the log, so the delta is found by its name, and checked like any
    other against the hash that the log has for its result. Needs the memory of two copies of
    the model.
    """
    from .weights_compact import compact as write

    _, store, catalog = _open(config, run_dir, sets)
    with _progress("reading", None, as_json) as done:
        made = write(catalog, store, first=first, last=last, done=done)
    if as_json:
        print_json(dataclasses.asdict(made))
    else:
        typer.echo(
            f"versions {made.first} to {made.last}: {made.bytes:,} bytes for {made.replaces} deltas of "
            f"{made.replaced_bytes:,}, in {made.name}"
        )


def gc(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete; without it this only says what would go.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go: the default.")] = False,
    keep_anchors: Annotated[
        int, typer.Option(min=2, help="The newest anchors to keep, and all behind them.")
    ] = 2,
    keep: Annotated[
        list[int] | None, typer.Option("--keep", metavar="VERSION", help="A version to keep too. Repeatable.")
    ] = None,
    engine_minutes: Annotated[
        float, typer.Option(min=1, help="An engine that has been silent for longer needs nothing any more.")
    ] = 60.0,
    orphans: Annotated[
        Literal["refuse", "keep", "delete"],
        typer.Option(
            help="Blobs that no record names: a dead trainer's, or another run's in the same store."
        ),
    ] = "refuse",
    as_json: JsonOption = False,
) -> None:
    """Delete anchors and deltas that nobody needs to go on: by default those before the second newest anchor.

    What stays: what engines that spoke within --engine-minutes may need; the way to each
    --keep version; the lists of samples, which `headrace audit` and redone steps read; the log.

    What is no longer possible for the versions that went: to export or verify them, to replay
    a step from their weights, to start an engine or a trainer at them. An engine that was
    silent for longer goes on from an anchor.

    Let one store.uri serve one run: blobs are told apart by policy and content, not by run.
    """
    from .weights_gc import clean_up, orphans_text, plan, plan_lines

    if yes and dry_run:
        raise ConfigError("--yes deletes and --dry-run does not: give one of them")
    loaded, store, catalog = _open(config, run_dir, sets)
    planned = plan(
        loaded,
        store,
        catalog,
        keep_anchors=keep_anchors,
        keep_versions=keep or (),
        engine_age_s=60 * engine_minutes,
    )
    names = planned.names(orphans)
    if yes and orphans == "refuse" and planned.cleanup.unknown:
        raise ConfigError(orphans_text(planned.cleanup))
    if yes:
        with _progress("deleting", len(names), as_json) as done:
            clean_up(store, names, done)
    if as_json:
        print_json(planned.as_json(names, deleted=yes))
        return
    typer.echo("\n".join(plan_lines(planned.cleanup, names, deleted=yes)))


def export(
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    version: Version = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a version as a Hugging Face model directory, with the same bits as in the engines."""
    from .weights_export import export_model
    from .weights_walk import Walker

    loaded, store, catalog = _open(config, run_dir, sets)
    if loaded.policy.model is None:
        raise ConfigError(
            "policy.model is not set: the model's configuration and tokenizer are copied from there"
        )
    wanted = catalog.newest if version is None else version
    chain = catalog.chain(wanted)
    walker = Walker(store)
    with _progress("reading", len(chain), as_json) as done:
        walker.follow(chain, done)
    assert walker.weights_hash is not None
    size = export_model(
        walker.bits,
        walker.dtypes,
        loaded.policy.model,
        target,
        version=wanted,
        weights_hash=walker.weights_hash,
    )
    fetched = sum(len(r.blobs) for r in chain)
    if as_json:
        print_json(
            {
                "version": wanted,
                "directory": str(target),
                "weights_bytes": size,
                "weights_hash": f"{walker.weights_hash:016x}",
                "blobs": fetched,
            }
        )
    else:
        typer.echo(f"version {wanted} ({walker.weights_hash:016x}) is in {target}: {size:,} bytes of weights")


def _open(
    config: Path | None, run_dir: Path | None, sets: list[str] | None
) -> tuple[Config, BlobStore, Catalog]:
    from ..streams.blobs import BlobStore
    from .settings import load_running, require_reachable
    from .weights_log import read_catalog

    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    store = BlobStore(loaded.store_uri)
    return loaded, store, read_catalog(loaded, store)


@contextlib.contextmanager
def _progress(what: str, total: int | None, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar on standard error, where that is a terminal; yields what is to be called after each item."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda _: bar.advance(task)
