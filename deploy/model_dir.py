"""Is this a model directory that the engine, the trainer and the tokenizer can load? Says all that is missing."""

from __future__ import annotations

import json
from pathlib import Path

from ..schemas.errors import ConfigError

WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def missing_parts(directory: Path, *, chat: bool) -> list[str]:
    """What `directory` lacks, as phrases; `chat` asks for a chat template too."""
    missing = []
    if not (directory / "config.json").exists():
        missing.append("config.json (the model's configuration)")
    if not any(any(directory.glob(pattern)) for pattern in WEIGHT_PATTERNS):
        missing.append(f"weights ({' or '.join(WEIGHT_PATTERNS)})")
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json or another tokenizer file; save it with the model)")
    elif chat and not _has_template(directory):
        missing.append(
            'a chat template (chat_template.jinja, or in tokenizer_config.json), which tasks with "messages" need; '
            'tasks with "prompt" do not'
        )
    return missing


def check_model_dir(directory: Path | None, *, chat: bool) -> Path:
    """`directory` if it can be used; ConfigError with everything that is missing otherwise."""
    if directory is None:
        raise ConfigError(
            "policy.model is not set: give a Hugging Face model directory (version 0 of the policy)"
        )
    if not directory.is_dir():
        raise ConfigError(f"policy.model = {str(directory)!r} is not a directory on this machine")
    missing = missing_parts(directory, chat=chat)
    if missing:
        raise ConfigError(f"the model directory {directory} lacks " + "; and ".join(missing))
    for path in sorted(directory.glob("*.safetensors")):
        _check_weights(path)
    return directory


def _check_weights(path: Path) -> None:
    """ConfigError unless the header of a safetensors file is whole and fits the file's size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as weights:
            names = weights.keys()
    except (SafetensorError, OSError) as e:
        raise ConfigError(
            f"the weights {path} cannot be read ({e}): the file is damaged or only a part of it is there; "
            "copy or download it again"
        ) from None
    if not names:
        raise ConfigError(f"the weights {path} hold no tensor")


def _has_template(directory: Path) -> bool:
    if any((directory / name).exists() for name in TEMPLATE_FILES):
        return True
    if (directory / "chat_templates").is_dir():
        return True
    try:
        return bool(json.loads((directory / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False
