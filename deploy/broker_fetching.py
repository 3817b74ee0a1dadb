"""`headrace broker fetch` for people: a progress bar, and what to do next."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ..schemas.errors import ConfigError
from .broker.apache import find_java, java_title
from .broker.choice import short
from .broker.fetch import fetch
from .interrupts import Interrupted, Interrupts
from .options import print_json


def fetch_shown(version: str | None, origin: str | None, sha512: str | None, *, as_json: bool) -> None:
    """Fetch with progress on standard error, then say what is there. Raises as `fetch`, and Interrupted."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    columns = (TextColumn("  "), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=None, visible=False)

    def progress(done: int, total: int | None) -> None:
        bar.update(task, completed=done, total=total, visible=total is None or done < total)

    try:
        with Interrupts(), bar:
            found = fetch(version, origin, sha512, say=console.print, progress=progress)
    except Interrupted:
        console.print("interrupted: nothing is used; the same command goes on from what was downloaded")
        raise
    try:
        java = java_title(find_java())
    except ConfigError as e:
        java = None
        missing = str(e)
    if as_json:
        print_json(found.as_json() | {"java": java})
        return
    out = Console(file=sys.stdout, soft_wrap=True, highlight=False)
    how = "is there already" if found.source is None else "is ready"
    checked = " (its SHA-512 is the one given or published)" if found.sha512 else ""
    out.print(f"Apache Kafka {found.version} {how}: {short(found.path)}{checked}")
    if java is None:
        out.print(f"one thing is missing: {missing}", style="yellow", markup=False)
    else:
        out.print(f"{java} runs it. `headrace demo` and `headrace up` use it from now on")
