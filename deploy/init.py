"""`headrace init`: files to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ..schemas.errors import ConfigError

TEMPLATES = ("headrace.toml", "tasks.jsonl", "reward.py", "environment.py")


def write_templates(directory: Path) -> list[Path]:
    """Write the templates into `directory`; ConfigError, and nothing written, where one of them exists."""
    present = [name for name in TEMPLATES if (directory / name).exists()]
    if present:
        raise ConfigError(f"{directory / present[0]} exists and is left as it is: choose another folder")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        written = []
        for name in TEMPLATES:
            path = directory / name
            path.write_text(files(__package__).joinpath("templates", name).read_text(encoding="utf-8"))
            written.append(path)
    except OSError as e:
        raise ConfigError(f"{directory} cannot be written to: {e}") from None
    return written
