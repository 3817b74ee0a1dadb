"""The model that a gateway serves, from its directory: tokenizer, renderer, context length. Without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...schemas.errors import ConfigError
from .chatml import ChatMLRenderer, ChatMLStyle
from .model import ChatModel
from .renderer import RenderError
from .renderer_text import TextEncoder

DEFAULT_CONTEXT = 32768


def load_chat_model(folder: Path | None, *, opening: tuple[str, ...] = ()) -> tuple[ChatModel, int]:
    """(model, context length in tokens). `opening`: what follows the generation prompt's header. ConfigError."""
    if folder is None:
        raise ConfigError(
            "policy.model is not set: the gateway needs the model's directory for its tokenizer"
        )
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"policy.model {folder} has no tokenizer.json; tokenizer.save_pretrained of a fast tokenizer writes one"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        raise ConfigError(f"{path} cannot be read: {e}") from None
    try:
        renderer = ChatMLRenderer(tokenizer, ChatMLStyle(opening=opening))
    except RenderError as e:
        raise ConfigError(f"policy.model {folder}: the gateway renders ChatML models; {e}") from None
    return ChatModel(renderer, TextEncoder(tokenizer)), _context(folder / "config.json")


def _context(path: Path) -> int:
    try:
        tree: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return DEFAULT_CONTEXT
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    found = tree.get("max_position_embeddings") or (tree.get("text_config") or {}).get(
        "max_position_embeddings"
    )
    return int(found or DEFAULT_CONTEXT)
