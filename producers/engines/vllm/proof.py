"""At start-up: what the map reads back must be what vLLM's own loader put there from the model's files."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors import safe_open

from .fusing import Experts, Layer
from .live import LiveShard

logger = logging.getLogger(__name__)


def check_against_files(shard: LiveShard, directory: Path) -> list[str]:
    """Compare every tensor in the safetensors files of `directory` with the place that the map gives it.

    A layer whose tensors lie elsewhere than the map says is taken out of it (its loader transposes or renames);
    returned are those tensors' names. RuntimeError where that leaves no way to write it.
    """
    moved: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                place = shard.places.get(name)
                if place is None:
                    continue
                given = file.get_tensor(name)
                same = tuple(given.shape) == place.shape and all(
                    _equal(given[b.box], shard.view(b)) for b in place.blocks
                )
                if not same:
                    moved.append(name)
    if moved:
        _take_out(shard, moved)
    return moved


def _equal(given: torch.Tensor, held: torch.Tensor) -> bool:
    return torch.equal(given.to(held.dtype), held.to(given.device))


def _take_out(shard: LiveShard, moved: list[str]) -> None:
    parameters = {b.parameter for name in moved for b in shard.places[name].blocks}
    lost: list[Layer] = [layer for layer in shard.layers if parameters & set(layer.held())]
    experts = [layer for layer in lost if isinstance(layer, Experts)]
    if experts:
        raise RuntimeError(
            f"vLLM keeps {moved[0]} in a layout that headrace does not know, so no update could be written there; "
            "start it with another kernel for this layer, or use the transformers engine"
        )
    logger.warning("written by the model's own loader: %s", ", ".join(sorted(parameters)))
    shard.without([layer for layer in shard.layers if layer not in lost])
