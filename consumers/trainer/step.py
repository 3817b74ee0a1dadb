"""One optimizer step: rows -> new weights and statistics. A function of weights, optimizer and rows alone.

On one machine with one thread count the same rows in the same order give the same bits, which is what lets a
restarted trainer redo lost steps from the log and check each one's hash.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ...schemas.config import TrainerConfig
from ...schemas.weight_hash import shapes_hash, sum_hashes
from .batch import MicroBatch, Row, collate, plan
from .flops import training_flops
from .loss import LossInputs, LossStats, policy_loss
from .master import Master, learning_rate
from .model import LiveModel, dropout_free, load_model
from .orders import Order, encode_rows, tell
from .shards import part
from .team import Alone, Team

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    version: int
    """The version it made."""
    finite: bool
    """False: the gradient was not finite, and the weights are those of the version before."""
    tokens: int
    """Real tokens in the forward."""
    sampled_tokens: int
    """Tokens in the loss."""
    flops: float
    """Of forward and backward, padding left out."""
    metrics: dict[str, float] = field(default_factory=dict)


class Learner:
    """The weights, and how they learn."""

    def __init__(self, model: torch.nn.Module, config: TrainerConfig, team: Team | None = None) -> None:
        """`model`: a causal LM with fp32 parameters, whole on every rank: version 0."""
        self._config = config
        self.team: Team = Alone() if team is None else team
        self.version = 0
        parameters = dict(model.named_parameters())
        self.master = Master(parameters, config, self.team)
        dropout_free(model)
        model.to(DTYPES[config.dtype])
        self.live = LiveModel(model, gradient_checkpointing=config.gradient_checkpointing)
        if self.team.size > 1:
            self.live.spread(self.team.size)
        self.publishable()

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Train `rows` and become version + 1. ValueError if no row has a trained token.

        Every rank is given all rows, and computes its share of the micro-batches.
        """
        tell(self.team, Order.STEP, lambda: encode_rows(rows))
        normaliser = float(sum(r.trained_tokens for r in rows))
        stats = LossStats()
        for batch, counts in self._share(rows):
            stats += self._backward(batch.to(self.live.device), normaliser, counts)
        stats = self._of_all_ranks(stats)
        norm, finite = self.master.update(self.version + 1)
        if not finite:
            logger.warning("step skipped: gradient norm is %s version=%d", norm, self.version + 1)
        self.version += 1
        self.publishable()
        lengths = [len(r.token_ids) for r in rows]
        return StepResult(
            version=self.version,
            finite=finite,
            tokens=sum(lengths),
            sampled_tokens=int(normaliser),
            flops=training_flops(self.live.model, lengths),
            metrics={
                **stats.metrics(),
                "grad_norm": norm if finite else -1.0,
                "lr": learning_rate(self._config, self.version),
                "tokens": float(sum(lengths)),
                "sampled_tokens": normaliser,
            },
        )

    def publishable(self) -> None:
        """Bring the live model to the rounded master: what the engines will have."""
        self.master.write_to(self.live.parameters)

    def bits(self) -> dict[str, np.ndarray]:
        """Name -> uint16 bf16 bits of this version: of this rank's rows, a copy."""
        return self.master.bits()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the whole tensor."""
        return {name: span.shape for name, span in self.master.spans.items()}

    def weights_hash(self) -> int:
        """Rolling hash (uint64) of all of this version's weights, whatever the number of ranks."""
        tell(self.team, Order.HASH)
        here = self.master.hashes()
        parts = self.team.exchange(json.dumps(here).encode())
        return shapes_hash(self.shapes, sum_hashes(json.loads(part) for part in parts))

    def adopt(self, bits: Mapping[str, np.ndarray], version: int) -> int:
        """Become `version` with exactly `bits`; returns how many elements differed from the rounded master, here.

        `bits`: of the whole tensors, of which this rank takes its rows.
        """
        replaced = self.master.adopt({name: part(bits[name], s) for name, s in self.master.spans.items()})
        self.version = version
        self.publishable()
        return replaced

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps."""
        return self.master.tensors()

    def load(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """Become the checkpoint of `version`. KeyError or ValueError when it is another model's."""
        self.master.load(tensors)
        self.version = version
        self.publishable()

    def _share(self, rows: Sequence[Row]) -> list[tuple[MicroBatch, bool]]:
        """This rank's micro-batches, and whether each counts.

        All ranks go forward and backward together, so one that has fewer than others repeats one for nothing.
        """
        groups = plan([len(r.token_ids) for r in rows], self._config.micro_batch_tokens)
        mine = groups[self.team.rank :: self.team.size]
        idle = -(-len(groups) // self.team.size) - len(mine)
        batches = [(collate([rows[i] for i in group]), True) for group in mine]
        return batches + [(collate([rows[i] for i in groups[0]]), False)] * idle

    def _of_all_ranks(self, stats: LossStats) -> LossStats:
        parts = self.team.exchange(json.dumps(dataclasses.asdict(stats)).encode())
        first, *others = (LossStats(**json.loads(p)) for p in parts)
        return sum(others, first)

    def _backward(self, batch: MicroBatch, normaliser: float, counts: bool) -> LossStats:
        if not len(batch.targets) and self.team.size == 1:
            return LossStats()
        logprobs, entropy = self.live.evaluate(batch)
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=batch.behaviour,
            advantages=batch.advantages,
            mask=torch.full_like(batch.targets, counts, dtype=torch.bool),
        )
        loss, stats = policy_loss(
            inputs,
            cap=self._config.tis_cap,
            entropy_coef=self._config.entropy_coef,
            normaliser=normaliser,
        )
        loss.backward()
        self.master.add_gradients(self.live.parameters)
        return stats


def make_learner(directory: Path, config: TrainerConfig, team: Team | None = None) -> Learner:
    """Version 0 from a Hugging Face directory; threads and determinism are set for the whole process."""
    torch.set_num_threads(config.threads)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return Learner(load_model(directory, dtype=torch.float32, device=device), config, team)
