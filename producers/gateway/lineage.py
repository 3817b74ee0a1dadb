"""Which agent of a session speaks: a label from the client's own headers, and the label of the agent that started it.

Codex names a thread and its parent's; Claude Code names the sub-agent, and the main agent by naming none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """One agent of a session."""

    label: str = ""
    """"" is the main agent, or any agent of a client that labels none."""
    parent: str | None = None
    """Label of the agent that started it; None for the main agent."""


MAIN = Lineage()


def lineage_of(headers: Mapping[str, str]) -> Lineage:
    """From request headers; `headers.get` must ignore case, as Starlette's does."""
    if agent := headers.get("x-claude-code-agent-id"):
        return Lineage(label=agent, parent=headers.get("x-claude-code-parent-agent-id") or "")
    thread, session = headers.get("thread-id"), headers.get("session-id")
    if thread and thread != session:
        parent = headers.get("x-codex-parent-thread-id")
        return Lineage(label=thread, parent="" if parent in (None, session) else parent)
    return MAIN


def session_hint(headers: Mapping[str, str]) -> str | None:
    """The client's own name for the whole session, one for all its agents."""
    return headers.get("x-claude-code-session-id") or headers.get("session-id") or None
