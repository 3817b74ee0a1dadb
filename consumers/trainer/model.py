"""The live model: bf16-rounded values, a forward that returns what the loss needs and nothing more.

The language-model head runs on the trained positions alone where the model allows it (compared once with the
full forward when the model is loaded), in chunks that are recomputed on the way back when the vocabulary is large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from ...schemas.errors import ConfigError
from .batch import MicroBatch
from .loss import token_statistics

logger = logging.getLogger(__name__)

CHUNK_LOGITS = 1 << 25
"""Logits held at once, in numbers."""


class LiveModel:
    """A causal language model whose parameters the trainer overwrites after each step."""

    def __init__(self, model: torch.nn.Module, *, gradient_checkpointing: bool = False) -> None:
        """`model`: a transformers causal LM, already in the dtype and on the device of the arithmetic."""
        self.model = model
        # transformers recomputes activations in training mode only; elsewhere nothing needs that mode.
        self.model.train(gradient_checkpointing)
        self.parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
        """Hugging Face name -> parameter; tied ones once."""
        for p in self.parameters.values():
            p.requires_grad_(True)
        self._pick_head()
        self._forward: Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]] = self._evaluate
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Where the arithmetic is done."""
        return next(iter(self.parameters.values())).device

    def evaluate(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy at every trained position, [N] float32 each, with gradient.

        After `spread` every rank calls it equally often, each with its own batch, and goes backward each time.
        """
        return self._forward(batch)

    def spread(self, size: int) -> None:
        """Cut every parameter over `size` ranks (FSDP2); gradients are then sums over the ranks, of one's own rows."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (size,))
        root = _Root(self.model, self._evaluate)
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        blocks = [module for module in self.model.modules() if type(module).__name__ in names]
        for module in (*blocks, root):
            made = fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
            # The loss is divided by the whole batch's tokens already. Gloo knows plain sums only.
            made.set_force_sum_reduction_for_comms(True)
            made.set_gradient_divide_factor(1.0)
        self.parameters = dict(self.model.named_parameters())
        self._forward = root

    def _evaluate(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._head is None:
            logits = self.model(input_ids=batch.input_ids, use_cache=False).logits
            rows = logits.flatten(0, 1)[batch.predictors]
            return token_statistics(rows / batch.temperatures[:, None], batch.targets)
        hidden = self._decoder(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows = hidden.flatten(0, 1)[batch.predictors]
        size = max(1, CHUNK_LOGITS // self._head.weight.shape[0])
        if len(rows) <= size:
            return self._statistics(rows, batch.temperatures, batch.targets)
        parts = [
            checkpoint(self._statistics, *part, use_reentrant=False)
            for part in zip(
                rows.split(size), batch.temperatures.split(size), batch.targets.split(size), strict=True
            )
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _statistics(
        self, hidden: torch.Tensor, temperatures: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._head is not None
        return token_statistics(self._head(hidden).float() / temperatures[:, None], targets)

    def _pick_head(self) -> None:
        """Use decoder + head apart if that equals the whole model (no scaled or capped logits in between)."""
        self._decoder = getattr(self.model, self.model.base_model_prefix, None)  # type: ignore[call-overload]
        self._head = self.model.get_output_embeddings()  # type: ignore[operator]
        if self._decoder is None or self._head is None:
            self._head = None
            return
        probe = torch.arange(4, device=self.device)[None] % self._head.weight.shape[0]
        with torch.no_grad():
            whole = self.model(input_ids=probe, use_cache=False).logits
            apart = self._head(self._decoder(input_ids=probe, use_cache=False).last_hidden_state)
        if not torch.equal(whole, apart):
            logger.info("the model changes its logits after the head: full logits are kept in memory")
            self._head = None


class _Root(torch.nn.Module):
    """The whole model under one forward: FSDP gathers the embeddings, the last norm and the head around it."""

    def __init__(
        self,
        model: torch.nn.Module,
        evaluate: Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.model, self._evaluate = model, evaluate

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See LiveModel.evaluate."""
        return self._evaluate(batch)


def load_model(directory: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """The causal LM in a Hugging Face directory, offline. Raises ConfigError when it is not one."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"policy.model {directory} is not a Hugging Face model directory: no config.json")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as e:
        raise ConfigError(f"policy.model {directory} cannot be loaded: {e}") from e
    return model.to(device)


def dropout_free(model: torch.nn.Module) -> None:
    """Switch dropout off: the trainer's log-probabilities must be those of the policy that samples."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
