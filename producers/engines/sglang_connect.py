"""From the configuration to an SglangEngine: keys, the server's settings, the model's sizes, the weights' directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from ...schemas.config import Config, SglangConfig
from ...schemas.errors import ConfigError, EngineError
from .sglang import PauseMode, SglangEngine
from .sglang_checkpoint import Checkpoint
from .sglang_control import ServerControl
from .sglang_http import Keys, ServerConnection

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


def connect(config: Config, engine_id: str) -> SglangEngine:
    """The engine for the server at engine.url, still without weights. Raises ConfigError, EngineError."""
    if config.engine.url is None:
        raise ConfigError("engine.url is not set: an engine of kind sglang drives the server at that address")
    settings = config.engine.sglang
    mode = pause_mode(config)
    vocab_size, positions = model_sizes(config.policy.model)
    connection = ServerConnection(config.engine.url, read_keys(settings))
    try:
        control = ServerControl(
            connection, seconds=settings.control_seconds, load_seconds=settings.load_seconds
        )
        info = control.info()
        check_server(info, mode, url=config.engine.url)
        control.version()
        context = min((int(n) for n in (info.get("context_length"), positions) if n), default=2**31)
        checkpoint = Checkpoint(checkpoint_dir(config, engine_id), config.policy.model)
        logger.info("sglang url=%s release=%s pause_mode=%s", config.engine.url, info.get("version"), mode)
        return SglangEngine(
            connection,
            control,
            checkpoint,
            vocab_size=vocab_size,
            context=context,
            pause_mode=mode,
            stream=settings.stream,
            verify_tensors=settings.verify_tensors,
            watch_seconds=settings.watch_seconds,
        )
    except BaseException:
        connection.close()
        raise


def pause_mode(config: Config) -> PauseMode:
    """What happens to requests in flight. Raises ConfigError where two settings contradict each other."""
    by_policy: PauseMode = "retract" if config.engine.kv_policy == "recompute" else "in_place"
    mode = config.engine.sglang.pause_mode or by_policy
    if mode == "in_place" and config.engine.kv_policy == "recompute":
        raise ConfigError(
            'engine.sglang.pause_mode "in_place" keeps old keys and values, engine.kv_policy "recompute" does'
            ' not: use pause_mode "retract", or kv_policy "stale"'
        )
    return mode


def check_server(info: dict[str, Any], mode: PauseMode, *, url: str) -> None:
    """ConfigError where the server was started in a way that would break what `mode` promises."""
    if mode == "retract" and info.get("disable_radix_cache") is not True:
        raise ConfigError(
            f"the SGLang server at {url} keeps prompts' keys and values in its radix cache, so a retracted"
            " request would go on with some of the old weights' (sgl-project/sglang issue 33783): start it with"
            ' --disable-radix-cache, or use engine.kv_policy = "stale"'
        )


def read_keys(settings: SglangConfig, env: dict[str, str] | None = None) -> Keys:
    """The keys that the settings name. Raises ConfigError; no message holds a key."""
    environment = os.environ if env is None else env

    def key(name: str | None, path: Path | None, what: str) -> str | None:
        if name is not None:
            if not environment.get(name):
                raise ConfigError(f"engine.sglang.{what}_env: the environment variable {name} is not set")
            found = environment[name].strip()
        elif path is not None:
            try:
                found = path.read_text().strip()
            except (OSError, UnicodeDecodeError) as e:
                raise ConfigError(f"engine.sglang.{what}_file {path} cannot be read: {e}") from None
        else:
            return None
        if not found or not found.isascii() or not found.isprintable():
            raise ConfigError(
                f"engine.sglang.{what}: the key is empty or has characters that a header cannot hold"
            )
        return found

    return Keys(
        api=key(settings.api_key_env, settings.api_key_file, "api_key"),
        admin=key(settings.admin_key_env, settings.admin_key_file, "admin_key"),
    )


def model_sizes(model: Path | None) -> tuple[int, int | None]:
    """(vocabulary, positions or None) of a model directory's config.json. Raises ConfigError."""
    if model is None:
        raise ConfigError(
            "policy.model is not set: an engine of kind sglang needs the model's directory for its sizes and tokenizer"
        )
    try:
        tree = json.loads((model / "config.json").read_text())
        text = tree.get("text_config", tree)
        positions = text.get("max_position_embeddings")
        return int(text["vocab_size"]), None if positions is None else int(positions)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"policy.model {model} has no config.json that can be used: {e!r}") from None


def checkpoint_dir(config: Config, engine_id: str) -> Path:
    """Where the weights for the server go: one folder per run and engine."""
    parent = config.engine.sglang.checkpoint_dir
    if parent is None:
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else config.run.dir.absolute() / "sglang"
    run = hashlib.sha256(str(config.run.dir.absolute()).encode()).hexdigest()[:8]
    return parent / f"headrace-{run}-{engine_id.replace(os.sep, '_')}"


def probe(config: Config) -> str:
    """What the server at engine.url says of itself, for `headrace doctor`. Raises ConfigError."""
    if config.engine.url is None:
        raise ConfigError("engine.url is not set: an engine of kind sglang drives the server at that address")
    connection = ServerConnection(config.engine.url, read_keys(config.engine.sglang))
    try:
        control = ServerControl(connection, seconds=5.0, load_seconds=5.0)
        info = control.info()
        check_server(info, pause_mode(config), url=config.engine.url)
        return f"SGLang {info.get('version', '(release unknown)')}, weight version {control.version()!r}"
    except EngineError as e:
        raise ConfigError(str(e)) from None
    finally:
        connection.close()
