"""The processes (ranks) of one trainer, and the small messages between them: plain bytes, in rank order.

Rank 0 speaks with Kafka; the others do what it tells them. What fails on one rank fails on all of them, so
that nobody waits for an answer that never comes.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from ...schemas.errors import ConfigError, HeadraceError, TeamError

_PATIENCE = datetime.timedelta(days=30)
"""Ranks wait for rank 0, which waits for samples; one that has died is told by its connection, not by time."""
_DONE, _FAILED = b"+", b"-"


class Team(Protocol):
    """What ranks need of each other."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def exchange(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in rank order. Every rank calls it. TeamError when one is gone."""

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's `data`; what the others give is not looked at. TeamError when one is gone."""

    def close(self) -> None:
        """Part; the others have been told."""


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def exchange(self, data: bytes) -> list[bytes]:
        """`data`."""
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        """`data`."""
        return data

    def close(self) -> None:
        """Nothing to part from."""


class TorchTeam:
    """The ranks of torch.distributed's default group."""

    def __init__(self) -> None:
        """Every rank makes one, at the same point. The messages travel by gloo, whatever the gradients take."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def exchange(self, data: bytes) -> list[bytes]:
        """See Team."""
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            longest = max(int(s) for s in sizes)
            parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, _tensor(data, longest), group=self._group)
        except RuntimeError as e:
            raise TeamError(f"another rank is gone: {e}") from e
        return [_bytes(part, int(n)) for part, n in zip(parts, sizes, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """See Team."""
        try:
            size = torch.tensor([len(data)])
            dist.broadcast(size, src=0, group=self._group)
            part = _tensor(data if self.rank == 0 else b"", int(size))
            dist.broadcast(part, src=0, group=self._group)
        except RuntimeError as e:
            raise TeamError(f"another rank is gone: {e}") from e
        return _bytes(part, int(size))

    def close(self) -> None:
        """See Team."""
        dist.destroy_process_group()


def together(team: Team, work: Callable[[], bytes]) -> list[bytes]:
    """What `work` returned on every rank, in rank order. Where it raises a HeadraceError or OSError, all raise.

    That is the error itself on its own rank and a TeamError with its text on the others.
    """
    failure: HeadraceError | OSError | None = None
    try:
        mine = _DONE + work()
    except (HeadraceError, OSError) as e:
        failure, mine = e, _FAILED + str(e).encode()
    parts = team.exchange(mine)
    if failure is not None:
        raise failure
    for rank, part in enumerate(parts):
        if part[:1] != _DONE:
            raise TeamError(f"rank {rank} failed: {part[1:].decode()}")
    return [part[1:] for part in parts]


def open_team() -> Team:
    """The team that torchrun's environment tells of; a team of one without it. Raises ConfigError."""
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise ConfigError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, not a number") from None
    if size == 1:
        return Alone()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError) as e:
        raise ConfigError(f"the {size} ranks cannot meet: {e}; start them with torchrun") from e
    return TorchTeam()


def _tensor(data: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")) or bytearray(1), dtype=torch.uint8)[:length]


def _bytes(part: torch.Tensor, size: int) -> bytes:
    return part[:size].numpy().tobytes()
