"""`headrace broker`: one broker until Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from ..schemas.errors import BrokerError
from .broker.launcher import Broker
from .interrupts import Interrupted, Interrupts
from .options import print_json
from .processes import children_stopped, tail

STOP_SECONDS = 10.0


def serve(start: Callable[[], Broker], *, as_json: bool) -> None:
    """Start it, say where it is, and wait. BrokerError when it dies by itself."""
    with Interrupts() as interrupts, children_stopped(grace_s=STOP_SECONDS):
        running: Broker | None = None
        try:
            running = start()
            _announce(running, as_json=as_json)
            status = running.process.wait()
            raise BrokerError(
                f"the broker died (status {status}). {running.log} ends with\n{tail(running.log)}"
            )
        except Interrupted:
            pass
        finally:
            interrupts.closing()
            if running is not None:
                running.stop()


def _announce(running: Broker, *, as_json: bool) -> None:
    if as_json:
        print_json({"kind": running.kind, "bootstrap": running.bootstrap, "pid": running.pid})
        return
    console = Console(file=sys.stdout, soft_wrap=True)
    console.print(f"{running.limits.title} at {running.bootstrap} (Ctrl-C stops it)", highlight=False)
    for note in running.limits.notes():
        console.print(f"  limit: {note}", style="dim", highlight=False)
