"""The cheap built-in rewards, which run inline.

exact_match   args: answer, strip (default true)
numeric       args: answer, tolerance (default 1e-6, absolute), relative_tolerance (default 0, of the answer)
calculator    the two-turn calculator task of the demo        addition     the one-turn addition task of the demo
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field

from ...schemas.errors import RewardError
from .args import Args, parsed
from .base import RewardResult, RolloutView

END = "$"
"""Ends an answer in the demo's tasks."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SUM = re.compile(r"^(\d+)([+*-])(\d+)=$")


class ExactArgs(Args):
    """Of `exact_match`."""

    answer: Any
    strip: bool = True


class NumericArgs(Args):
    """Of `numeric`; the wider tolerance counts."""

    answer: float
    tolerance: Annotated[float, Field(ge=0)] = 1e-6
    relative_tolerance: Annotated[float, Field(ge=0)] = 0.0


def exact_match(rollout: RolloutView) -> float:
    """1.0 when the last assistant message is `answer`, up to surrounding white space unless strip is false."""
    args = parsed(ExactArgs, rollout.args)
    given, wanted = rollout.answer, str(args.answer)
    if args.strip:
        given, wanted = given.strip(), wanted.strip()
    return float(given == wanted)


def numeric(rollout: RolloutView) -> float | RewardResult:
    """1.0 when the last number in the last assistant message is `answer` within `tolerance`; no number: failed."""
    args = parsed(NumericArgs, rollout.args)
    tolerance = max(args.tolerance, args.relative_tolerance * abs(args.answer))
    found = _NUMBER.findall(rollout.answer)
    if not found:
        return RewardResult.failure("no_number")
    return float(abs(float(found[-1].replace(",", "")) - args.answer) <= tolerance)


def calculator(rollout: RolloutView) -> float:
    """1.0 when the whole last assistant message is the right number followed by the end marker."""
    return float(rollout.answer == f"{_wanted(rollout)}{END}")


def addition(rollout: RolloutView) -> float:
    """1.0 when the whole last assistant message is the right number, with or without the end marker."""
    return float(rollout.answer.removesuffix(END) == str(_wanted(rollout)))


def _wanted(rollout: RolloutView) -> str:
    """The spec's `answer`, or the prompt's own sum."""
    if "answer" in rollout.args:
        return str(rollout.args["answer"])
    prompt = next((m.content for m in rollout.messages if m.role == "user"), "")
    match = _SUM.match(prompt.strip())
    if match is None:
        raise RewardError("reward_args", f"no answer in the spec, and the prompt is no sum: {prompt[:40]!r}")
    a, operator, b = int(match[1]), match[2], int(match[3])
    return str(a + b if operator == "+" else a - b if operator == "-" else a * b)
