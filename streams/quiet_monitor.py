"""Faust's statistics about every message, left out: nothing reads them, and they cost a twentieth of the worker."""

from __future__ import annotations

from typing import Any

from faust.sensors import Monitor


class QuietMonitor(Monitor):
    """Counts rebalances, assignments and commits; no single messages, events or sendings."""

    def on_message_in(self, *args: Any) -> None:
        """Nothing."""

    def on_message_out(self, *args: Any) -> None:
        """Nothing."""

    def on_stream_event_in(self, *args: Any) -> None:
        """Nothing."""

    def on_stream_event_out(self, *args: Any) -> None:
        """Nothing."""

    def on_send_initiated(self, *args: Any) -> None:
        """Nothing."""

    def on_send_completed(self, *args: Any) -> None:
        """Nothing."""

    def on_send_error(self, *args: Any) -> None:
        """Nothing."""
