"""From the configuration to the engine."""

from __future__ import annotations

import os

from ....schemas.config import Config
from ....schemas.errors import ConfigError
from .engine import VllmEngine
from .local import LocalVllm
from .remote import RemoteVllm
from .transport import Transport


def connect(config: Config, seed: int) -> VllmEngine:
    """The vLLM that the configuration names, still without weights. Raises ConfigError, EngineError."""
    settings = config.engine.vllm
    if config.engine.url is not None:
        transport: Transport = RemoteVllm(config.engine.url, api_key=_key(settings.api_key_env))
    elif config.policy.model is not None:
        transport = LocalVllm(config.policy.model, config.engine, seed=seed)
    else:
        raise ConfigError(
            "policy.model is not set: the engine needs the model's directory for its architecture"
        )
    return VllmEngine(
        transport,
        kv_policy=config.engine.kv_policy,
        pause_mode=settings.pause_mode,
        handover=settings.handover,
    )


def _key(name: str | None) -> str | None:
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(f"engine.vllm.api_key_env names {name}, which is not set in the environment")
    return os.environ[name]
