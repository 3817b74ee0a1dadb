"""Runs whose rollouts are void: what to tell, and where the cause is written."""

from __future__ import annotations

from pathlib import Path

from .history import History

MIN_VOIDS = 64
BATCHES = 2
"""A run ends when so many batches' worth of rollouts, and MIN_VOIDS, are void, and no other has been seen."""
TAIL_BYTES = 65536
TRACEBACK = "Traceback (most recent call last):"
_CLUES = (("streams-*.log", " void: "), ("rollout-*.log", "environment failed"))
"""Which log has which line about a void rollout."""


def voids_line(history: History, logs: Path) -> str:
    """How many rollouts are void, and the log that says why."""
    return f"{history.voids} of {history.fated} rollouts so far are void: see {find_clue(logs)[0]}"


def hopeless(history: History, logs: Path, *, batch_size: int, since_ms: int) -> str | None:
    """Why a run that will never train is to be ended, or None."""
    if not history.all_void(at_least=max(MIN_VOIDS, BATCHES * batch_size), since_ms=since_ms):
        return None
    log, line = find_clue(logs)
    why = f"all of the first {history.fated} rollouts are void (the reward or the environment failed), "
    return f"{why}so nothing can be trained. {log} says\n{line}"


def find_clue(logs: Path) -> tuple[Path, str]:
    """The log that tells of void rollouts, and the last that it says about one; the stream log where none does."""
    for pattern, mark in _CLUES:
        for path in sorted(logs.glob(pattern)):
            lines = _end_of(path)
            marked = [n for n, line in enumerate(lines) if mark in line]
            if marked:
                return path, _with_cause(lines, marked[-1])
    return logs / "streams-0.log", "nothing about void rollouts"


def _with_cause(lines: list[str], at: int) -> str:
    """A line, and the last one of its traceback where one follows."""
    end = at + 1
    if lines[end : end + 1] == [TRACEBACK]:
        end += 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        return "\n".join([lines[at], *lines[end : end + 1]])
    return lines[at]


def _end_of(path: Path) -> list[str]:
    with path.open("rb") as f:
        f.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return f.read().decode(errors="replace").splitlines()
