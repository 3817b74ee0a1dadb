"""Trajectories with their samples -> rows -> length-sorted, right-padded micro-batches under a token budget.

No attention mask is needed: attention is causal and the padding stands to the right of every real token. The
order depends on lengths and positions alone, so the same samples give the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...schemas.sample import Sample
from ...schemas.trajectory import Trajectory

PAD_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """One trajectory as the trainer sees it."""

    token_ids: np.ndarray
    """[T] int32."""
    loss_mask: np.ndarray
    """[T] bool; position 0 never counts, as nothing predicts it."""
    behaviour: np.ndarray
    """[T] float32."""
    advantages: np.ndarray
    """[T] float32."""
    temperature: float = 1.0
    """The logits are divided by it, as they were when `behaviour` was recorded."""

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask[1:].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """B rows padded to S tokens, and N trained positions of them, flat."""

    input_ids: torch.Tensor
    """[B, S] int64."""
    predictors: torch.Tensor
    """[N] int64: flat positions (row * S + column) whose hidden state predicts a trained token."""
    targets: torch.Tensor
    """[N] int64: the trained tokens."""
    behaviour: torch.Tensor
    """[N] float32."""
    advantages: torch.Tensor
    """[N] float32."""
    temperatures: torch.Tensor
    """[N] float32."""
    lengths: tuple[int, ...]
    """Real tokens of each row."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on `device`."""
        tensors = ("input_ids", "predictors", "targets", "behaviour", "advantages", "temperatures")
        return MicroBatch(**{name: getattr(self, name).to(device) for name in tensors}, lengths=self.lengths)


def make_row(trajectory: Trajectory, sample: Sample) -> Row:
    """The row of an admitted sample: its advantage on every token, or each turn's own."""
    advantages = np.full(len(trajectory.token_ids), sample.advantage or 0.0, dtype=np.float32)
    if sample.turn_advantages is not None and len(sample.turn_advantages) == len(trajectory.turns):
        for turn, value in zip(trajectory.turns, sample.turn_advantages, strict=True):
            advantages[turn.start : turn.end] = value
    processed = trajectory.sampling.logprobs_mode == "processed"
    return Row(
        token_ids=trajectory.token_ids,
        loss_mask=trajectory.loss_mask,
        behaviour=trajectory.logprobs,
        advantages=advantages,
        temperature=trajectory.sampling.temperature if processed else 1.0,
    )


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped into micro-batches, shortest rows first; rows x longest <= budget unless a row is longer."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and (len(groups[-1]) + 1) * lengths[i] <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def micro_batches(rows: Sequence[Row], budget: int) -> list[MicroBatch]:
    """All rows, in the order of `plan`."""
    groups = plan([len(r.token_ids) for r in rows], budget)
    return [collate([rows[i] for i in group]) for group in groups]


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Pad `rows` to the longest and flatten what is trained."""
    lengths = tuple(len(r.token_ids) for r in rows)
    shape = (len(rows), max(lengths))
    ids = np.full(shape, PAD_ID, dtype=np.int64)
    mask = np.zeros(shape, dtype=bool)
    behaviour = np.zeros(shape, dtype=np.float32)
    advantages = np.zeros(shape, dtype=np.float32)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        ids[i, :n] = row.token_ids
        mask[i, 1:n] = row.loss_mask[1:]
        behaviour[i, :n] = row.behaviour
        advantages[i, :n] = row.advantages
    at = np.flatnonzero(mask)
    temperatures = np.array([r.temperature for r in rows], dtype=np.float32)[at // shape[1]]
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        predictors=torch.from_numpy(at - 1),
        targets=torch.from_numpy(ids.reshape(-1)[at]),
        behaviour=torch.from_numpy(behaviour.reshape(-1)[at]),
        advantages=torch.from_numpy(advantages.reshape(-1)[at]),
        temperatures=torch.from_numpy(temperatures),
        lengths=lengths,
    )
