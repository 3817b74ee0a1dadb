"""What `headrace broker start` leaves for later commands.

<folder>/state.json   kind, addresses, and of each node its process and when that began
<folder>/lock         held by a start or a stop
<folder>/<kind>/      its records and logs
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ...schemas.errors import ConfigError
from ..processes import accepts
from .limits import BrokerKind
from .pids import process_start

STATE = "state.json"
LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One process as it was started."""

    name: str
    pid: int
    started: str
    """From `process_start`: tells it from a later process with the same id."""
    started_at: float
    """Unix seconds."""
    address: str
    command: list[str]
    log: str

    @property
    def runs(self) -> bool:
        """True while that very process does."""
        return process_start(self.pid) == self.started

    @property
    def up(self) -> bool:
        """True while it runs and accepts connections."""
        host, _, port = self.address.rpartition(":")
        return self.runs and accepts(host, int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A broker in the background."""

    kind: BrokerKind
    nodes: tuple[NodeState, ...]

    @property
    def bootstrap(self) -> str:
        """Of all nodes."""
        return ",".join(node.address for node in self.nodes)

    @property
    def ports(self) -> list[int]:
        """One a node."""
        return [int(node.address.rpartition(":")[2]) for node in self.nodes]


def read_state(folder: Path) -> State | None:
    """None where nothing was ever started; ConfigError for a file that cannot be read."""
    path = folder / STATE
    try:
        raw = json.loads(path.read_text())
        return State(kind=raw["kind"], nodes=tuple(NodeState(**node) for node in raw["nodes"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(
            f"{path} cannot be read ({e}): end the broker by hand, then remove that file, or give another --data"
        ) from None


def write_state(folder: Path, state: State) -> None:
    """Whole or not at all."""
    partial = folder / f"{STATE}.part"
    partial.write_text(json.dumps(asdict(state), indent=1) + "\n")
    partial.replace(folder / STATE)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One start or stop at a time in `folder`; another one is waited for."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a")
    except OSError as e:
        raise ConfigError(
            f"{folder} cannot be made and written to ({e.strerror}): give another --data"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
