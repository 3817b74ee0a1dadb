"""How often each role of a local run was started again, by cause: a file in the run's folder that outlives them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

RESTARTS_FILE = "restarts.json"

Counts = Mapping[str, Mapping[str, int]]
"""role -> cause -> restarts."""


def write_restarts(run_dir: Path, counts: Counts) -> None:
    """Replace the file. A full disk costs the counts, not the run."""
    path = run_dir / RESTARTS_FILE
    new = path.with_suffix(".new")
    try:
        new.write_text(json.dumps(counts, indent=1) + "\n")
        new.replace(path)
    except OSError as e:
        logger.warning("%s cannot be written: %s", path, e)


def read_restarts(run_dir: Path) -> Counts:
    """Empty where there was no restart, or where the run is not on this machine."""
    try:
        found: Counts = json.loads((run_dir / RESTARTS_FILE).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        logger.warning("%s cannot be read: %s", run_dir / RESTARTS_FILE, e)
        return {}
    return found


def restarts_text(counts: Counts) -> list[str]:
    """One line a role: `streams-0: 3 (stalled 1, killed 2)`."""
    return [
        f"{role}: {sum(causes.values())} ({', '.join(f'{c} {n}' for c, n in causes.items())})"
        for role, causes in counts.items()
    ]
