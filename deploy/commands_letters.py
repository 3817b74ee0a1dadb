"""`headrace deadletters`: ls, show, requeue, drop."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..schemas.errors import ConfigError
from .options import ConfigOption, JsonOption, RunDirOption, SetOption, print_json
from .settings import load_running, require_reachable

if TYPE_CHECKING:
    from ..streams.letterbox import Letter, Settlement, Wanted

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Numbers = Annotated[list[int] | None, typer.Argument(help="Letters by the number that `ls` shows.")]
Stage = Annotated[str | None, typer.Option(help="Only of this stage, such as verify.")]
TopicName = Annotated[str | None, typer.Option("--topic", help="Only from this topic.")]
Reason = Annotated[str | None, typer.Option(help="Only with this reason.")]
Partition = Annotated[int | None, typer.Option(min=0, help="Only from this partition of their topic.")]
Offset = Annotated[int | None, typer.Option(min=0, help="Only from this offset of their topic.")]
Since = Annotated[str | None, typer.Option(help="Only since: 90s, 30m, 2h, 7d ago, or 2026-01-31T12:00.")]
Until = Annotated[str | None, typer.Option(help="Only until, written as for --since.")]
Limit = Annotated[int, typer.Option(min=1, help="The newest so many.")]
Every = Annotated[bool, typer.Option("--every", help="All that are not settled; needed without any filter.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands on the `deadletters` group."""
    for name, command in (("ls", ls), ("show", show), ("requeue", requeue), ("drop", drop)):
        app.command(name)(command)


def moment_ms(text: str | None, now_s: float, *, option: str) -> int | None:
    """Unix milliseconds of a time such as `2h` (ago) or an ISO date. Raises ConfigError."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d+)([smhd])", text):
        return int((now_s - int(match[1]) * UNITS[match[2]]) * 1000)
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is no time: write 90s, 30m, 2h or 7d (ago), or 2026-01-31T12:00"
        ) from None


def ls(
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    stage: Stage = None,
    topic: TopicName = None,
    reason: Reason = None,
    partition: Partition = None,
    offset: Offset = None,
    since: Since = None,
    until: Until = None,
    limit: Limit = 50,
    everything: Annotated[bool, typer.Option("--all", help="Requeued and dropped ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List dead letters: where each came from, and why."""
    from ..streams.letterbox import open_letterbox

    wanted = _wanted(None, stage, topic, reason, partition, offset, since, until)
    with open_letterbox(_loaded(config, run_dir, sets)) as box:
        found = [i for i in box.letters() if wanted.takes(i) and (everything or i.settled is None)]
    shown = found[-limit:]
    if as_json:
        print_json({"deadletters": [_plain(i) for i in shown]})
        return
    print_letters(shown, everything)
    if len(found) > len(shown):
        typer.echo(f"{len(found) - len(shown)} older ones are not shown: --limit {len(found)}")


def show(
    number: Annotated[int, typer.Argument(min=0, help="The number that `ls` shows.")],
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one dead letter: why, its headers, and what is in it."""
    from ..streams.letterbox import open_letterbox

    with open_letterbox(_loaded(config, run_dir, sets)) as box:
        item = next((i for i in box.letters() if i.number == number), None)
        record = box.content(number) if item is not None else None
    if item is None or record is None:
        raise ConfigError(f"there is no dead letter {number}; `headrace deadletters ls --all` lists them")
    headers = [(k, (v or b"").decode("utf-8", "backslashreplace")) for k, v in record.headers]
    if as_json:
        value = None if record.value is None else record.value.hex()
        key = None if record.key is None else record.key.hex()
        print_json({**_plain(item), "headers": headers, "key_hex": key, "value_hex": value})
        return
    for name, text in _told(item).items():
        typer.echo(f"{name:14} {text}")
    typer.echo("\nheaders")
    for name, text in headers:
        typer.echo(f"  {name}: {text[:200]}")
    typer.echo(f"\nkey    {record.key!r}\nvalue  {item.size} bytes")
    typer.echo("\n".join(hex_lines(record.value or b"")))
    typer.echo(f"\nonce the cause is mended: headrace deadletters requeue {number}")


def _told(item: Letter) -> dict[str, Any]:
    """The facts as a person reads them."""
    plain = _plain(item)
    at = datetime.fromtimestamp(plain.pop("at_ms") / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    return {"at": at} | plain | {"settled": plain["settled"] or "no"}


def requeue(
    numbers: Numbers = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    stage: Stage = None,
    topic: TopicName = None,
    reason: Reason = None,
    partition: Partition = None,
    offset: Offset = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    most: Annotated[int, typer.Option("--max", min=1, help="Requeue a record at most so many times.")] = 3,
    force: Annotated[bool, typer.Option("--force", help="Beyond --max, and settled ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send the original records to their topics again. Exit status 1 where one was refused."""
    from ..streams.letterbox import open_letterbox

    wanted = _wanted(numbers, stage, topic, reason, partition, offset, since, until, every=every)
    with open_letterbox(_loaded(config, run_dir, sets)) as box:
        chosen = _chosen(box.letters(), wanted, settled_too=force and bool(numbers))
        _report(box.requeue(chosen, limit=most, force=force), as_json)


def drop(
    numbers: Numbers = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    run_dir: RunDirOption = None,
    stage: Stage = None,
    topic: TopicName = None,
    reason: Reason = None,
    partition: Partition = None,
    offset: Offset = None,
    since: Since = None,
    until: Until = None,
    every: Every = False,
    as_json: JsonOption = False,
) -> None:
    """Mark letters as seen: `ls` hides them; the log keeps them. Exit status 1 where one was refused."""
    from ..streams.letterbox import open_letterbox

    wanted = _wanted(numbers, stage, topic, reason, partition, offset, since, until, every=every)
    with open_letterbox(_loaded(config, run_dir, sets)) as box:
        _report(box.drop(_chosen(box.letters(), wanted)), as_json)


def hex_lines(data: bytes, *, rows: int = 16) -> list[str]:
    """A dump of the first `rows` * 16 bytes."""
    lines = []
    for at in range(0, min(len(data), rows * 16), 16):
        part = data[at : at + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
        lines.append(f"  {at:06x}  {part.hex(' '):47}  {text}")
    return lines + ([f"  ... {len(data) - rows * 16} more bytes"] if len(data) > rows * 16 else [])


def _loaded(config: Any, run_dir: Any, sets: Any) -> Any:
    loaded = load_running(config, run_dir, sets or ())
    require_reachable(loaded)
    return loaded


def _wanted(
    numbers: list[int] | None,
    stage: str | None,
    topic: str | None,
    reason: str | None,
    partition: int | None,
    offset: int | None,
    since: str | None,
    until: str | None,
    *,
    every: bool = True,
) -> Wanted:
    from ..streams.letterbox import Wanted

    if not (
        numbers
        or every
        or any(x is not None for x in (stage, topic, reason, partition, offset, since, until))
    ):
        raise ConfigError(
            "which letters? Give their numbers (`headrace deadletters ls`), a filter, or --every"
        )
    now = time.time()
    return Wanted(
        numbers=frozenset(numbers or ()),
        stage=stage,
        topic=topic,
        reason=reason,
        partition=partition,
        offset=offset,
        since_ms=moment_ms(since, now, option="--since"),
        until_ms=moment_ms(until, now, option="--until"),
    )


def _chosen(letters: list[Letter], wanted: Wanted, *, settled_too: bool = False) -> list[Letter]:
    missing = wanted.numbers - {i.number for i in letters}
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        raise ConfigError(f"there is no dead letter {names}; `headrace deadletters ls --all` lists them")
    named = bool(wanted.numbers)
    return [i for i in letters if wanted.takes(i) and (named or settled_too or i.settled is None)]


def _report(done: list[Settlement], as_json: bool) -> None:
    if as_json:
        print_json({"letters": [asdict(d) for d in done]})
    else:
        for d in done:
            typer.echo(f"{d.number}: {d.note}" if d.done else f"{d.number}: refused: {d.note}")
        if not done:
            typer.echo("none")
    if not all(d.done for d in done):
        raise typer.Exit(1)


def _plain(item: Letter) -> dict[str, Any]:
    fields = asdict(item.letter)
    return {
        "offset": item.number,
        **{("source_offset" if k == "offset" else k): v for k, v in fields.items()},
        "requeues": item.requeues,
        "truncated": item.truncated,
        "settled": item.settled,
    }


def print_letters(letters: list[Letter], everything: bool) -> None:
    """A line for each, or more where the terminal is narrow; `everything`: what became of them too."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ["number", "at", "stage", "record"] + (["settled"] if everything else []):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")  # the one that gives way in a narrow terminal
    for i in letters:
        at = datetime.fromtimestamp(max(0, i.letter.at_ms) / 1000).strftime("%m-%d %H:%M:%S")
        record = f"{i.letter.topic}/{i.letter.partition}/{i.letter.offset}"
        why = f"{i.letter.reason}: {i.letter.detail}" + (" (cut)" if i.truncated else "")
        if i.requeues:
            why += f" (requeued {i.requeues} times)" if i.requeues > 1 else " (requeued once)"
        cells = [str(i.number), at, i.letter.stage, record, *([i.settled or ""] if everything else []), why]
        table.add_row(*map(Text, cells))
    Console().print(table if letters else "none")
