"""The house: every package is listed, and imports go only left."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ORDER = {"schemas": 0, "streams": 1, "producers": 2, "consumers": 2, "deploy": 3}


def sources() -> list[Path]:
    return sorted(p for room in ORDER for p in (ROOT / room).rglob("*.py"))


def imported_rooms(path: Path) -> set[str]:
    """Top-level rooms that a module imports, at any depth of nesting."""
    here = path.relative_to(ROOT).parent.parts
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level + 1]
                parts = [*base, *(node.module or "").split(".")]
            else:
                parts = (node.module or "").split(".")
                parts = parts[1:] if parts[0] == "headrace" else []
            names = [parts[0]] if parts and parts[0] else [a.name for a in node.names if node.level]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("headrace.")]
        else:
            continue
        rooms.update(name for name in names if name in ORDER)
    return rooms


def test_every_folder_with_an_init_is_a_listed_package() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"headrace"}
    for init in (p for room in ORDER for p in (ROOT / room).rglob("__init__.py")):
        found.add("headrace." + ".".join(init.relative_to(ROOT).parent.parts))
    assert listed == found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_only_left(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for other in imported_rooms(path) - {room}:
        assert ORDER[other] < ORDER[room], f"{room} imports {other}"


def test_constraints_pin_every_direct_dependency() -> None:
    import re

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]
    pinned = {
        re.split("==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in wanted:
        name = re.split(r"[ ;<>=\[]", requirement)[0].lower().replace("_", "-")
        assert name in pinned, f"{name} is not pinned in constraints.txt"
