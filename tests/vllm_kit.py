"""Models small enough to make on the spot that vLLM's CPU kernels take (head size 32), and plain forwards of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import anchor, bits_of, perturbed, picked
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.producers.engines.live_weights import LiveWeights
from headrace.producers.engines.vllm.local import BACKEND, EXTENSION, LocalVllm
from headrace.producers.engines.vllm.remote import RemoteVllm
from headrace.schemas.config import EngineConfig

VOCAB = 61
Weights = dict[str, np.ndarray]


def small_model(kind: str, seed: int = 0) -> Any:
    """A random model in float32 that holds bf16 values; its distributions are far from uniform."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_positions": 1024, "n_embd": 64, "n_layer": 2, "n_head": 2}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.05)).float().eval()
        LiveWeights(model).round_to_bf16()
        return model
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": kind == "tied",
        "initializer_range": 0.1,
    }
    if kind == "moe":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **settings,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                norm_topk_prob=True,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
    model = model.float().eval()
    LiveWeights(model).round_to_bf16()
    return model


def saved(kind: str, directory: Path) -> Path:
    """A model directory whose weights no test uses: the first anchor must replace them all."""
    small_model(kind, seed=99).save_pretrained(directory)
    return directory


def versions(kind: str, count: int) -> list[Weights]:
    """Weights of versions 0 to count - 1, each some steps away from the one before."""
    made = [bits_of(small_model(kind))]
    for seed in range(1, count):
        made.append(perturbed(made[-1], seed))
    return made


def model_with(kind: str, weights: Weights) -> Any:
    """A plain float32 model that holds `weights`."""
    model = small_model(kind)
    LiveWeights(model).write(anchor(weights, 0))
    return model


@torch.no_grad()
def recomputed(model: Any, prompt: Any, tokens: Any, *, temperature: float = 1.0) -> np.ndarray:
    """[len(tokens)] logprobs of `tokens` after `prompt` by one forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    return picked(model(ids).logits[0, len(prompt) - 1 : -1] / temperature, list(tokens))


@torch.no_grad()
def on_old_keys(models: list[Any], ends: list[int], prompt: Any, tokens: Any) -> np.ndarray:
    """Logprobs where model i sampled up to tokens[:ends[i]] on top of the keys and values of those before it.

    The last token before a change of weights has not been through the model yet when they change.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    cache, at, start, parts = DynamicCache(), 0, 0, []
    for model, end in zip(models, ends, strict=True):
        upto = len(prompt) + end - 1
        logits = model(ids[:, at:upto], past_key_values=cache, use_cache=True).logits[0]
        parts.append(picked(logits[len(prompt) + start - 1 - at :], list(tokens[start:end])))
        at, start = upto, end
    return np.concatenate(parts)


class Kept:
    """One vLLM for many engines in turn: a transport that a closing engine does not end."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.exact_counts = transport.exact_counts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._facts = self._call(transport.start())
        self.process: subprocess.Popen | None = None

    @property
    def alive(self) -> bool:
        return self._transport.alive

    async def start(self) -> Any:
        return self._facts

    async def close(self) -> None:
        if self.alive:
            await self.resume()  # an engine that was closed while its weights were torn has left it paused

    def everywhere(self, function: Any) -> None:
        """Have every worker of a vLLM in our process call `function(worker)`."""
        self._call(self._transport._llm.collective_rpc(function))

    def end(self) -> None:
        self._call(self._transport.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def __getattr__(self, name: str) -> Any:
        """vLLM belongs to the event loop that it was started on."""

        async def call(*args: Any) -> Any:
            work = getattr(self._transport, name)(*args)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

        return call

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def started(directory: Path, *, ranks: int = 1, **engine: Any) -> Kept:
    """A vLLM for the model in `directory`, or a skipped test where there is none."""
    pytest.importorskip("vllm", reason="no vLLM in this environment: deploy/vllm/install FOLDER makes one")
    config = EngineConfig.model_validate(
        {
            "kind": "vllm",
            "cache_tokens": 32768,
            "max_requests": 64,
            "vllm": {"tensor_parallel": ranks, "args": {"enforce_eager": True}},
            **engine,
        }
    )
    return Kept(LocalVllm(directory, config, seed=7))


def attached(directory: Path) -> Kept:
    """A stock vLLM server for the model in `directory`, and the transport to it."""
    pytest.importorskip("vllm", reason="no vLLM in this environment: deploy/vllm/install FOLDER makes one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {
        "model": directory,
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": 1024,
        "block-size": 32,
        "num-gpu-blocks-override": 1024,
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": EXTENSION,
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--enable-scale-out", "--enforce-eager", "--skip-tokenizer-init"]
    command += [str(x) for name, value in arguments.items() for x in (f"--{name}", value)]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/health", process)
        kept = Kept(RemoteVllm(url))
    except BaseException:
        process.kill()
        raise
    kept.process = process
    return kept


def _wait_for(url: str, process: subprocess.Popen, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{url} did not answer within {seconds} s")
