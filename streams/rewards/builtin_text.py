"""Rewards of an answer's form: `regex` and `json_schema`. Patterns can backtrack for ever, so both have a limit.

regex: the `regex` package, which stops at its own limit and lets other threads run; json_schema: in a reward host.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Annotated, Any, Literal

import regex as regular
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from pydantic import Field, field_validator, model_validator
from referencing import Registry
from referencing.exceptions import Unresolvable

from ...schemas.errors import RewardError
from .args import Args, last_block, parsed
from .base import RewardResult, RolloutView


class RegexArgs(Args):
    """Of `regex`."""

    pattern: str
    mode: Literal["search", "full"] = "search"
    """Found anywhere in the last answer, or equal to all of it."""
    group: int | str | None = None
    """1.0 only where this group is `answer`."""
    answer: str | None = None
    seconds: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Of one match; longer: void."""

    @model_validator(mode="after")
    def _consistent(self) -> RegexArgs:
        try:
            compiled = regular.compile(self.pattern)
        except regular.error as e:
            raise ValueError(f"pattern {self.pattern[:60]!r} is no regular expression: {e}") from None
        if (self.group is None) != (self.answer is None):
            raise ValueError("group and answer go together: the group that must equal the answer")
        known = (*range(compiled.groups + 1), *compiled.groupindex)
        if self.group is not None and self.group not in known:
            raise ValueError(f"pattern has no group {self.group!r}")
        return self


def regex(rollout: RolloutView) -> float:
    """1.0 where the last assistant message matches `pattern` (and its `group` is `answer`)."""
    args = parsed(RegexArgs, rollout.args)
    compiled = regular.compile(args.pattern)
    match = compiled.fullmatch if args.mode == "full" else compiled.search
    try:
        found = match(rollout.answer, timeout=args.seconds, concurrent=True)
    except TimeoutError:
        raise RewardError(
            "reward_timeout", f"pattern {args.pattern[:60]!r} took over {args.seconds} s"
        ) from None
    return float(found is not None and (args.group is None or found[args.group] == args.answer))


class JsonSchemaArgs(Args):
    """Of `json_schema`."""

    schema_: dict[str, Any] = Field(alias="schema")

    @field_validator("schema_")
    @classmethod
    def _valid(cls, schema: dict[str, Any]) -> dict[str, Any]:
        try:
            validator_for(schema, default=Draft202012Validator).check_schema(schema)
        except SchemaError as e:
            raise ValueError(f"no JSON schema, at {e.json_path}: {e.message[:120]}") from None
        return schema


def json_schema(rollout: RolloutView) -> float | RewardResult:
    """1.0 where the JSON of the last assistant message is valid; none there: failed `no_json`.

    The JSON is the last closed block fenced as `json` (or as nothing), or else the first object or array in the text.
    """
    schema = rollout.arg("schema")
    validator = _validator(json.dumps(schema, sort_keys=True))
    block = last_block(rollout.answer, "json")
    try:
        value = _strictly(block) if block is not None else _first(rollout.answer)
    except (ValueError, RecursionError):
        return RewardResult.failure("no_json")
    try:
        return float(validator.is_valid(value))
    except RecursionError:
        return RewardResult.failure("json_too_deep")
    except Unresolvable as e:
        raise RewardError("reward_args", f"schema: a reference leads out of it: {e}") from None


@lru_cache(maxsize=256)
def _validator(text: str) -> Validator:
    schema = parsed(JsonSchemaArgs, {"schema": json.loads(text)}).schema_
    registry: Registry[Any] = Registry()  # with one of our own, references are never fetched
    return validator_for(schema, default=Draft202012Validator)(schema, registry=registry)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _strictly(text: str) -> Any:
    return _DECODER.decode(text)


def _first(text: str) -> Any:
    start = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=-1)
    if start < 0:
        raise ValueError("no object or array")
    return _DECODER.raw_decode(text, start)[0]
