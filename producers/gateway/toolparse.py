"""What a model writes inside <tool_call>: Hermes and Qwen JSON, Qwen-coder XML, GLM XML.

The text of JSON arguments is kept byte for byte. XML values are text; they become JSON by the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .messages import Tool

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_GLM = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')


def parse_call(body: str, tools: Mapping[str, Tool]) -> tuple[str, str] | None:
    """(name, arguments as a JSON object's text), or None for what is no call."""
    body = body.strip()
    if body.startswith("{"):
        return _json_call(body)
    if match := _FUNCTION.search(body):
        name = match[1].strip()
        pairs = {k.strip(): _unwrapped(v) for k, v in _PARAMETER.findall(match[2])}
        return name, _typed(pairs, tools.get(name))
    if "<arg_key>" in body or body in tools:
        name = body.split("<arg_key>", 1)[0].strip()
        pairs = {k.strip(): v for k, v in _GLM.findall(body)}
        return (name, _typed(pairs, tools.get(name))) if name else None
    return None


def _json_call(body: str) -> tuple[str, str] | None:
    try:
        tree, end = _DECODER.raw_decode(body)
    except (ValueError, RecursionError):
        return None
    if body[end:].strip() or not isinstance(tree.get("name"), str) or not tree["name"]:
        return None
    value = tree.get("arguments", tree.get("parameters"))
    if isinstance(value, str):  # encoded twice
        try:
            again = _DECODER.decode(value)
        except (ValueError, RecursionError):
            return None
        return (tree["name"], value) if isinstance(again, dict) else None
    if value is None:
        return tree["name"], "{}"
    return (tree["name"], _source(body, value)) if isinstance(value, dict) else None


def _source(body: str, value: dict[str, Any]) -> str:
    """The text in `body` that was read as `value`."""
    for match in _ARGUMENTS.finditer(body):
        try:
            found, end = _DECODER.raw_decode(body, match.end())
        except ValueError:
            continue
        if found == value:
            return body[match.end() : end]
    return json.dumps(value, ensure_ascii=False)


def _unwrapped(value: str) -> str:
    """Without the line ends that the format puts around a value."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(pairs: Mapping[str, str], tool: Tool | None) -> str:
    schema = tool.parameters.get("properties") if tool is not None else None
    properties = schema if isinstance(schema, dict) else {}
    return json.dumps({k: _value(v, properties.get(k)) for k, v in pairs.items()}, ensure_ascii=False)


def _value(text: str, schema: Any) -> Any:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind and text != "null"):
        return text
    if kind is None and schema is None:
        return text
    try:
        return _DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        lowered = text.strip().lower()
        return {"true": True, "false": False, "none": None}.get(lowered, text)
