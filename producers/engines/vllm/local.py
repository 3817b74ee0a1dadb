"""A vLLM of our own: AsyncLLM in this process, its scheduler and workers in processes below it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ....schemas.config import EngineConfig
from ....schemas.errors import ConfigError, EngineError
from ..protocol import GenerateRequest
from .transport import Facts, Finished, Sampled, facts_of, spans_of

EXTENSION = "headrace.producers.engines.vllm.worker.WorkerExtension"
BACKEND = "headrace"
MISSING = (
    'engine.kind = "vllm" needs vLLM, which is not installed in this environment: `deploy/vllm/install FOLDER` makes '
    "one with headrace and vLLM 0.32 for the CPU; on GPUs, `pip install vllm` beside headrace"
)
_BLOCK = 32
_ROUNDS = 64
"""Of the event loop: vLLM hands a step's tokens over in chunks of 128 requests, one round each, and one to take them."""
_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}


class LocalVllm:
    """AsyncLLM."""

    exact_counts = True

    def __init__(self, model: Path, config: EngineConfig, *, seed: int = 0) -> None:
        """`model`: a Hugging Face model directory. Raises ConfigError where vLLM is not installed."""
        require_vllm(config)
        if not (model / "config.json").is_file():
            raise ConfigError(
                f"policy.model {model} is not a Hugging Face model directory: it has no config.json"
            )
        self._model, self._config, self._seed = model, config, seed
        self._llm: Any = None

    async def start(self) -> Facts:
        """Start the processes and load the model. Raises ConfigError, EngineError."""
        _environment(self._config)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            args = AsyncEngineArgs(**engine_arguments(self._model, self._config, self._seed))
        except TypeError as e:
            raise ConfigError(f"engine.vllm.args: {e}; the names are those of vLLM's EngineArgs") from None
        try:
            self._llm = AsyncLLM.from_engine_args(args)
            await self._llm.init_weight_transfer_engine(_request("Init", init_info={}))
        except (ValueError, RuntimeError, OSError) as e:
            raise EngineError(f"vLLM did not start: {e}") from e
        return facts_of(await self.rpc("headrace_hello"))

    @property
    def alive(self) -> bool:
        """False once its scheduler or a worker has died."""
        return self._llm is not None and not self._llm.errored

    async def generate(
        self, key: str, request: GenerateRequest, max_tokens: int, salt: str, sampled: Sampled
    ) -> Finished:
        """Sample; cancelling aborts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # the caller names every token that ends a turn
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(request.token_ids), "cache_salt": salt}
        last = None
        try:
            async for output in self._llm.generate(prompt, params, key):
                last = output.outputs[0]
                tokens = last.token_ids
                sampled(tokens, [p[t].logprob for p, t in zip(last.logprobs or (), tokens, strict=True)])
        except (EngineDeadError, EngineGenerateError, ValueError) as e:
            raise EngineError(f"vLLM: {type(e).__name__}: {e}") from e
        if last is None or last.finish_reason not in _REASONS:
            raise EngineError(f"vLLM ended a request with {last.finish_reason if last else 'nothing'!r}")
        spans = [(s.version, s.start, s.end) for s in last.weight_versions or ()]
        return Finished(_REASONS[last.finish_reason], spans_of(spans))

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests early."""
        await self._llm.abort(list(keys))

    async def pause(self, mode: Literal["keep", "abort", "wait"]) -> None:
        """Stop sampling; keeps all caches."""
        # As `pause_generation`, which then sleeps for 20 ms so that tokens which are sampled already are handed over.
        core = self._llm.engine_core
        await core.pause_scheduler_async(mode=mode, clear_cache=False)
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
            while not core.outputs_queue.empty():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def resume(self) -> None:
        """Go on."""
        await self._llm.resume_generation()

    async def prefill_again(self) -> None:
        """Forget all keys and values."""
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM kept its cache although it was asked to forget it")

    async def rpc(self, method: str, *args: str) -> list[dict[str, Any]]:
        """A method of the worker extension on every rank."""
        return await self._llm.collective_rpc(method, args=args)

    async def write(self, version: int) -> None:
        """Have every rank write a staged update."""
        await self._llm.start_weight_update()
        await self._llm.update_weights(_request("Update", update_info={"version": version}))
        await self._llm.finish_weight_update()

    async def label(self, version: int) -> None:
        """Only the label."""
        await self._llm.update_weight_version(str(version))

    async def close(self) -> None:
        """End the processes. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()


def require_vllm(config: EngineConfig) -> None:
    """ConfigError where the configuration wants a vLLM of our own and none is installed."""
    if config.kind == "vllm" and config.url is None and importlib.util.find_spec("vllm") is None:
        raise ConfigError(MISSING)


def engine_arguments(model: Path, config: EngineConfig, seed: int) -> dict[str, Any]:
    """Arguments for vLLM; `engine.vllm.args` wins over all but what updates depend on."""
    described = json.loads((model / "config.json").read_text())
    text = described.get("text_config", described)
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    made: dict[str, Any] = {
        "dtype": config.dtype,
        "seed": seed,
        "tensor_parallel_size": config.vllm.tensor_parallel,
        "max_num_seqs": min(config.max_requests, config.max_batch_tokens),
        "max_num_batched_tokens": config.max_batch_tokens,
        "num_gpu_blocks_override": config.cache_tokens // _BLOCK,
        "block_size": _BLOCK,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if positions:  # else vLLM finds out
        made["max_model_len"] = min(positions, config.cache_tokens - _BLOCK)
    return {
        **made,
        **config.vllm.args,
        "model": str(model),
        "skip_tokenizer_init": True,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
    }


def _environment(config: EngineConfig) -> None:
    """What vLLM takes from the environment, where the user has not set it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def _request(kind: str, **fields: Any) -> Any:
    from vllm.distributed.weight_transfer import base

    return getattr(base, f"WeightTransfer{kind}Request")(**fields)
