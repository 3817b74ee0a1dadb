"""The [engine] section: what samples, and how it is driven."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from .config_section import Section


class SglangConfig(Section):
    """Of engine.kind "sglang": how to drive a server that somebody else has started."""

    pause_mode: Literal["in_place", "retract", "abort"] | None = None
    """Requests in flight at an update: `in_place` keeps them and their cache, `retract` computes their cache again,
    `abort` ends them. None: in_place for kv_policy stale, retract for recompute."""
    checkpoint_dir: Path | None = None
    """A folder that the server sees under the same path, with room for the weights; None: one in /dev/shm."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's --api-key."""
    api_key_file: Path | None = None
    """Or a file that holds it."""
    admin_key_env: str | None = None
    """The same for --admin-api-key, where the server has one."""
    admin_key_file: Path | None = None
    stream: bool = False
    """Read tokens as they come: they are counted at once, for more traffic and some 40 ms of every pause."""
    verify_tensors: Annotated[int, Field(ge=0)] = 4
    """Changed tensors whose first rows are read back from the server after each update."""
    control_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Limit of one control call."""
    load_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Limit of the server's load of the weights."""
    watch_seconds: Annotated[float, Field(gt=0)] = 5.0
    """How often the server is asked for its version: a restarted one has old weights and gets ours again."""

    @model_validator(mode="after")
    def _one_source(self) -> SglangConfig:
        for what in ("api_key", "admin_key"):
            if getattr(self, f"{what}_env") is not None and getattr(self, f"{what}_file") is not None:
                raise ValueError(f"set {what}_env or {what}_file, not both")
        return self


class VllmConfig(Section):
    """Of engine.kind "vllm": one in our process, or the server at `engine.url`."""

    pause_mode: Literal["keep", "abort", "drain"] = "keep"
    """Requests in flight at an update: go on after it, end with what they have, or are waited for."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share the model."""
    handover: Path | None = None
    """Folder in which updates wait for vLLM's workers, which must see it too; None: one in /dev/shm."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the --api-key of the server at `engine.url`."""
    args: dict[str, Any] = {}
    """More of vLLM's own EngineArgs: gpu_memory_utilization, enforce_eager, ..."""


class EngineConfig(Section):
    kind: Literal["transformers", "scripted", "vllm", "sglang"] = "transformers"
    """`sglang` drives the server at `url`; it has been tested against a stub, not on a real SGLang."""
    url: str | None = None
    """http://host:port of the server that an engine of kind `sglang` drives; `vllm`: without it, one in our process."""
    vllm: VllmConfig = VllmConfig()
    sglang: SglangConfig = SglangConfig()
    count: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: a free one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the arithmetic; the published weights are bf16 either way."""
    kv_policy: Literal["recompute", "stale"] = "stale"
    """After an update, requests in flight: prefill again under the new weights, or go on with the old keys and values."""
    max_requests: Annotated[int, Field(ge=1)] = 256
    """Requests decoded at once."""
    max_batch_tokens: Annotated[int, Field(ge=16)] = 1024
    cache_tokens: Annotated[int, Field(ge=256)] = 65536
    """Size of the paged key-value cache."""
    threads: Annotated[int, Field(ge=1)] = 1

    @field_validator("url")
    @classmethod
    def _server(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError(
                "write http://host:port; a key belongs into api_key_env of engine.sglang or engine.vllm"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_driver(self) -> EngineConfig:
        if self.url is not None and self.count > 1:
            raise ValueError(
                "engine.count must be 1 with engine.url: several engines would change one server's weights;"
                " run one `headrace engine --id NAME --set engine.url=URL` for each server"
            )
        return self
