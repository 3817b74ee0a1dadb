"""Ranks of a trainer for tests: threads of this process, or processes that meet through gloo."""

from __future__ import annotations

import multiprocessing
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
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


def on_processes(
    size: int, folder: Path, act: Callable[..., None], *args: Any, timeout_s: float = 120
) -> None:
    """`act(team, *args)` by each of `size` processes that meet through gloo; fails unless all end with 0.

    They are forked from a process that has imported torch once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"])
    meeting = f"file://{folder / uuid.uuid4().hex}"
    processes = [
        context.Process(target=_rank, args=(rank, size, meeting, act, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, codes


def _rank(rank: int, size: int, meeting: str, act: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from headrace.consumers.trainer.team import TorchTeam

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    act(TorchTeam(), *args)
    dist.barrier()
    dist.destroy_process_group()
