"""The [gateway] section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .config_section import Section


class GatewayConfig(Section):
    """The address that agent harnesses are pointed at."""

    enabled: bool = False
    """`headrace up` starts one."""
    host: str = "127.0.0.1"
    """Anything but this machine needs keys_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0: a free one."""
    keys_file: Path | None = None
    """TOML with [[keys]] of sha256, tenant, policy, capture; `headrace gateway --new-key TENANT` makes one. None: no key
    is asked for."""
    models: list[str] = ["claude-*", "gpt-*", "codex-*", "o[0-9]*"]
    """Shell patterns of model names that mean this policy, beside its id: what harnesses send by themselves."""
    thinking: Literal["keep", "branch"] = "keep"
    """A client that replays other reasoning than was sampled: keep the sampled tokens, or open a branch."""
    opening: list[str] = []
    """Markers or text that the generation prompt writes after its header, such as <think> for models that always reason."""
    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Sampled at, whatever clients ask for; None: as they ask. What is sampled at 0 is served and not trained."""
    context_tokens: Annotated[int, Field(ge=16)] | None = None
    """Prompt and answer; None: max_position_embeddings of the model."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Of one answer; None: what the context allows."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024
    max_messages: Annotated[int, Field(ge=1)] = 4096
    max_in_flight: Annotated[int, Field(ge=1)] = 1024
    """Requests served at once; above it 503."""
    max_rollouts: Annotated[int, Field(ge=1)] = 4096
    """Rollouts open at once; above it new sessions get 503."""
    idle_seconds: Annotated[float, Field(gt=0)] = 900.0
    """A rollout to which nothing happens for so long is finished."""
    keepalive_seconds: Annotated[float, Field(gt=0)] = 5.0
    """Silence after which a stream shows that it lives."""
    patience_seconds: Annotated[float, Field(ge=0)] = 20.0
    """How long a turn waits for an engine that fails or updates, before 503."""
    spool_dir: Path | None = None
    """Finished rollouts lie here until Kafka has them; None: <run.dir>/gateway-spool. One gateway to a folder."""
    spool_mb: Annotated[int, Field(ge=1)] = 1024
    """Above it new sessions get 503."""
