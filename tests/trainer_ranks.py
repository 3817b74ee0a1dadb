"""Ranks of a trainer for tests: threads of this process that exchange bytes through a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ThreadTeam:
    """One rank; all of them share `board` and `barrier`."""

    def __init__(self, rank: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self._board, self._barrier = board, barrier

    def exchange(self, data: bytes) -> list[bytes]:
        """See Team."""
        self._board[self.rank] = data
        self._barrier.wait(60)
        found = list(self._board)
        self._barrier.wait(60)
        return found

    def broadcast(self, data: bytes) -> bytes:
        """See Team."""
        return self.exchange(data)[0]


def on_threads(size: int, act: Callable[[Any], Any]) -> list[Any]:
    """`act` by each of `size` ranks at once: what it returned or raised, in rank order."""
    board, barrier = [b""] * size, threading.Barrier(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(ThreadTeam(rank, board, barrier))
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
