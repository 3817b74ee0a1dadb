"""Reads JSON bodies: every value of the wrong kind is a RequestError that names the place.

Fields that nobody asks for are ignored: clients send more of them with every release.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import RequestError

_MISSING = object()
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a whole number"}


def load_object(body: bytes) -> Fields:
    """The JSON object that a body holds."""
    try:
        tree = json.loads(body)
    except UnicodeDecodeError as e:
        raise RequestError(f"the body is not UTF-8: {e.reason} at byte {e.start}") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as e:
        raise RequestError(f"the body is not valid JSON: {e}") from None
    if not isinstance(tree, dict):
        raise RequestError(f"the body must be a JSON object, not {kind_of(tree)}")
    if b"\\ud" in body or b"\\uD" in body:
        try:
            json.dumps(tree, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body holds half of a surrogate pair (\\ud800 to \\udfff alone)") from None
    return Fields(tree, "")


def kind_of(value: Any) -> str:
    """What `value` is, for a message."""
    if value is None:
        return "null"
    return next((text for kind, text in _KINDS.items() if type(value) is kind), "a number")


class Fields:
    """An object in the body, and where it stands."""

    __slots__ = ("at", "tree")

    def __init__(self, tree: Mapping[str, Any], at: str) -> None:
        self.tree, self.at = tree, at

    def path(self, name: str) -> str:
        """Where the field `name` stands."""
        return f"{self.at}.{name}" if self.at else name

    def refuse(self, name: str, message: str) -> RequestError:
        """An error about the field `name`."""
        return RequestError(f"{self.path(name)}: {message}", param=self.path(name))

    def has(self, name: str) -> bool:
        """Whether it is there and not null."""
        return self.tree.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it is; None without one."""
        return self.tree.get(name)

    def text(self, name: str, default: Any = _MISSING) -> str:
        """A string."""
        return self._of(name, str, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        return self._of(name, bool, default)

    def child(self, name: str, default: Any = _MISSING) -> Fields:
        """An object."""
        return Fields(self._of(name, dict, default), self.path(name))

    def items(self, name: str, default: Any = _MISSING) -> list[Any]:
        """A list."""
        return self._of(name, list, default)

    def objects(self, name: str, default: Any = _MISSING) -> Iterator[Fields]:
        """The objects of a list."""
        for i, item in enumerate(self.items(name, default)):
            at = f"{self.path(name)}[{i}]"
            if not isinstance(item, dict):
                raise RequestError(f"{at}: must be an object, not {kind_of(item)}", param=at)
            yield Fields(item, at)

    def whole(self, name: str, default: Any = _MISSING, *, low: int, high: int) -> Any:
        """A whole number in [low, high]; 3.0 counts as 3."""
        value = self.tree.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        elif value is None:
            value = self._of(name, int, default)
            if value is None:
                return None
        if type(value) is not int:
            raise self.refuse(name, f"must be a whole number, not {kind_of(value)}")
        if not low <= value <= high:
            raise self.refuse(name, f"{value} is not in {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        value = self.tree.get(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self.refuse(name, f"must be a number, not {kind_of(value)}")
        if not (low <= value <= high and math.isfinite(value)):
            raise self.refuse(name, f"{value} is not in {low:g} to {high:g}")
        return float(value)

    def texts(self, name: str, *, most: int) -> tuple[str, ...]:
        """A string, or a list of at most `most` strings; empty without it."""
        value = self.tree.get(name)
        if value is None:
            return ()
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(t, str) for t in items):
            raise self.refuse(name, "must be a string or a list of strings")
        if len(items) > most:
            raise self.refuse(name, f"{len(items)} of them, at most {most} are supported")
        return tuple(t for t in items if t)

    def _of(self, name: str, kind: type, default: Any) -> Any:
        value = self.tree.get(name)
        if value is None:
            if default is _MISSING:
                raise self.refuse(name, f"is missing; it must be {_KINDS[kind]}")
            return default
        if type(value) is not kind:
            raise self.refuse(name, f"must be {_KINDS[kind]}, not {kind_of(value)}")
        return value
