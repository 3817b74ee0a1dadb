"""A running vLLM model in the words of fusing.py. Runs in the worker; the only place that knows vLLM's layer classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from .fusing import Columns, Experts, Layer, Piece, Plain, Stacked


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> the storage that updates are written to: parameters, but the unpacked master of packed experts."""
    found = {name: p.data for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        for leaf, master in getattr(module, "headrace_masters", {}).items():
            found[f"{path}.{leaf}"] = master
    return found


def layers_of(model: torch.nn.Module) -> tuple[list[Layer], list[str]]:
    """What is understood of `model`, and the names of the parameters that are not."""
    names = {id(p): name for name, p in model.named_parameters()}
    layers: list[Layer] = []
    understood: set[str] = set()
    # A tied head is the embedding's module, or shares its parameter, under a second path: both names are known.
    for path, module in model.named_modules(remove_duplicate=False):
        own = {leaf: names[id(p)] for leaf, p in module.named_parameters(recurse=False)}
        made = list(_layers(model, path, module, own)) if own else []
        layers += made
        understood.update(parameter for layer in made for parameter in layer.held())
    return layers, sorted(set(names.values()) - understood)


def check_loadable(model: torch.nn.Module, names: Iterable[str]) -> None:
    """RuntimeError if the model's own loader cannot write these parameters again once they are in use."""
    left = set(names)
    for path, module in model.named_modules():
        mine = {f"{path}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)} & left
        quantised = isinstance(module, LinearBase) and not isinstance(
            module.quant_method, UnquantizedLinearMethod
        )
        if mine and (quantised or isinstance(module, RoutedExperts)):
            raise RuntimeError(
                f"{min(mine)} is kept in a form that cannot be updated (quantised, or experts spread over ranks or with "
                "biases): start vLLM without that, or use the transformers engine"
            )


def _layers(
    model: torch.nn.Module, path: str, module: torch.nn.Module, own: dict[str, str]
) -> Iterator[Layer]:
    shapes = {leaf: tuple(p.shape) for leaf, p in module.named_parameters(recurse=False)}
    match module:
        case LinearBase() if not isinstance(module.quant_method, UnquantizedLinearMethod):
            return
        case QKVParallelLinear() | MergedColumnParallelLinear():
            pieces = _pieces(model, path, module)
            if pieces:
                yield from _stacked(pieces, own, shapes)
        case ColumnParallelLinear() | VocabParallelEmbedding():
            yield from _stacked((_rows(path, module),), own, shapes)
        case RowParallelLinear():
            size = module.input_size_per_partition
            for leaf, parameter in own.items():
                if leaf == "bias":
                    yield Plain(parameter=parameter, name=f"{path}.{leaf}", shape=shapes[leaf])
                else:
                    yield Columns(
                        parameter=parameter,
                        name=f"{path}.{leaf}",
                        rows=module.output_size,
                        columns=module.input_size,
                        low=module.tp_rank * size,
                        high=(module.tp_rank + 1) * size,
                    )
        case RoutedExperts():
            yield from _experts(path, module, own, shapes)
        case _ if not isinstance(module, LinearBase) or isinstance(module, ReplicatedLinear):
            for leaf, parameter in own.items():
                yield Plain(parameter=parameter, name=f"{path}.{leaf}", shape=shapes[leaf])


def _stacked(
    pieces: tuple[Piece, ...], own: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> Iterator[Layer]:
    for leaf, parameter in own.items():
        yield Stacked(parameter=parameter, leaf=leaf, pieces=pieces, rest=shapes[leaf][1:])


def _rows(path: str, module: Any) -> Piece:
    if isinstance(module, VocabParallelEmbedding):
        at = module.shard_indices
        return Piece(
            name=path,
            rows=module.org_vocab_size,
            low=at.org_vocab_start_index,
            high=at.org_vocab_end_index,
        )
    size = module.output_size_per_partition
    low = module.tp_rank * size
    return Piece(name=path, rows=module.output_size, low=low, high=low + size)


def _pieces(model: torch.nn.Module, path: str, module: Any) -> tuple[Piece, ...]:
    """Of a fused layer, in stacking order; none where the model does not say what it is made of."""
    parent, _, leaf = path.rpartition(".")
    names = getattr(model, "packed_modules_mapping", {}).get(leaf, ())
    prefix = f"{parent}." if parent else ""
    if isinstance(module, QKVParallelLinear):
        if len(names) != 3:
            return ()
        # Where there are more ranks than key heads, several ranks hold the same one.
        ranks = (module.tp_rank, *[module.tp_rank // module.num_kv_head_replicas] * 2)
        sizes = (
            (module.total_num_heads * module.head_size, module.num_heads * module.head_size),
            (module.total_num_kv_heads * module.head_size, module.num_kv_heads * module.head_size),
            (module.total_num_kv_heads * module.v_head_size, module.num_kv_heads * module.v_head_size),
        )
        return tuple(
            Piece(name=prefix + name, rows=rows, low=rank * held, high=(rank + 1) * held)
            for name, rank, (rows, held) in zip(names, ranks, sizes, strict=True)
        )
    if len(names) != len(module.output_sizes):
        return ()
    pieces = []
    for name, rows in zip(names, module.output_sizes, strict=True):
        held = rows // module.tp_size
        low = module.tp_rank * held
        pieces.append(Piece(name=prefix + name, rows=rows, low=low, high=low + held))
    return tuple(pieces)


def _experts(
    path: str, module: Any, own: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> Iterator[Layer]:
    config = module.moe_config
    if set(own) != {"w13_weight", "w2_weight"} or module.local_num_experts != module.global_num_experts:
        return  # biases, scales, or experts spread over ranks: the model's own loader must see to it
    masters = getattr(module, "headrace_masters", {})
    w13 = tuple(masters["w13_weight"].shape) if masters else shapes["w13_weight"]
    held = config.intermediate_size_per_partition
    yield Experts(
        w13=own["w13_weight"],
        w2=own["w2_weight"],
        name=path.removesuffix(".routed_experts"),
        experts=module.global_num_experts,
        hidden=w13[2],
        intermediate=held * config.tp_size,
        low=held * config.tp_rank,
        high=held * (config.tp_rank + 1),
        padded=w13[1] // 2,
    )
