"""From the configuration to the engine."""

from __future__ import annotations

from ....schemas.config import Config
from ....schemas.errors import ConfigError
from .engine import VllmEngine
from .local import LocalVllm


def connect(config: Config, seed: int) -> VllmEngine:
    """The vLLM that the configuration names, still without weights. Raises ConfigError, EngineError."""
    if config.policy.model is None:
        raise ConfigError(
            "policy.model is not set: the engine needs the model's directory for its architecture"
        )
    return VllmEngine(
        LocalVllm(config.policy.model, config.engine, seed=seed),
        kv_policy=config.engine.kv_policy,
        pause_mode=config.engine.vllm.pause_mode,
        handover=config.engine.vllm.handover,
    )
