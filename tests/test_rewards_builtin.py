"""The built-in rewards: what they score, what they call a failure of the policy, what voids, which argument is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError, RewardError
from headrace.streams.rewards.args import last_block
from headrace.streams.rewards.base import Message, RewardResult, RolloutView
from headrace.streams.rewards.builtin import numeric
from headrace.streams.rewards.builtin_text import json_schema, regex
from headrace.streams.rewards.code_tests import python_tests
from headrace.streams.rewards.composed import combined
from headrace.streams.rewards.load import load_reward

OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def answered(text: str, **args: Any) -> RolloutView:
    return RolloutView(
        task_id="t", rollout_id="r", messages=(Message("user", "?"), Message("assistant", text)), args=args
    )


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\na\n```\ntext\n```python\nb\n```", "b"),
        ("```\na\n```", "a"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("```python\nnever closed", None),
        ("no block", None),
        ("```Python\n  a\n\nb\n  ```<|im_end|>", "  a\n\nb"),
    ],
)
def test_the_last_closed_block_of_the_language_counts(text: str, block: str | None) -> None:
    assert last_block(text, "python") == block


@pytest.mark.parametrize(
    ("args", "text", "reward"),
    [
        ({"pattern": r"\d+"}, "it is 42.", 1.0),
        ({"pattern": r"\d+", "mode": "full"}, "it is 42.", 0.0),
        ({"pattern": r"\d+", "mode": "full"}, "42", 1.0),
        ({"pattern": r"is (?P<n>\d+)", "group": "n", "answer": "42"}, "it is 42.", 1.0),
        ({"pattern": r"is (\d+)", "group": 1, "answer": "41"}, "it is 42.", 0.0),
    ],
)
def test_regex(args: dict[str, Any], text: str, reward: float) -> None:
    assert regex(answered(text, **args)) == reward


def test_a_pattern_that_backtracks_for_ever_is_stopped() -> None:
    with pytest.raises(RewardError) as caught:
        regex(answered("a" * 40 + "b", pattern=r"(?:(a+)+)+\1c\1|(a|aa)+$", seconds=0.05, mode="full"))
    assert caught.value.reason == "reward_timeout"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', 1.0),
        ('Here: {"a": 1}<|im_end|>', 1.0),
        ('{"a": "1"}', 0.0),
        ('{"a": 2}\n```json\n{"b": 1}\n```', 0.0),
        ("none", RewardResult.failure("no_json")),
        ('{"a": NaN}', RewardResult.failure("no_json")),
        ("[" * 100_000, RewardResult.failure("no_json")),
        ("```json\n{\n```", RewardResult.failure("no_json")),
    ],
)
def test_json_schema(text: str, found: float | RewardResult) -> None:
    assert json_schema(answered(text, schema=OBJECT)) == found


def test_a_schema_that_leads_out_of_itself_fetches_nothing() -> None:
    with pytest.raises(RewardError, match="leads out of it"):
        json_schema(answered("{}", schema={"$ref": "http://127.0.0.1:9/schema"}))


def test_numeric_takes_the_wider_tolerance() -> None:
    assert numeric(answered("1009", answer=1000, relative_tolerance=0.01)) == 1.0
    assert numeric(answered("1011", answer=1000, relative_tolerance=0.01)) == 0.0
    assert numeric(answered("1011", answer=1000, relative_tolerance=0.01, tolerance=11)) == 1.0


ADD = "```python\ndef add(a, b):\n    {body}\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(-1, 1) == 0"]


def run_code(body: str, **args: Any) -> RewardResult:
    text = ADD.format(body=body) if not body.startswith("```") else body
    return asyncio.run(python_tests(answered(text, **{"tests": TESTS, "timeout_seconds": 20, **args})))


def test_code_is_scored_by_its_tests() -> None:
    assert run_code("return a + b") == RewardResult(1.0, {"passed": 3.0, "tests": 3.0})
    assert run_code("return abs(a) + b") == RewardResult(0.0, {"passed": 2.0, "tests": 3.0})
    assert run_code("return abs(a) + b", partial="fraction").value == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def add(", "code_raised"),
        ("import sys; sys.exit(0)", "code_raised"),
        ("import os; os._exit(0)", "code_died"),
        ("x = bytearray(8 << 30)", "code_raised"),
        ("import os\nos.fork()", "code_raised"),
        ("import socket\nsocket.socket()", "code_raised"),
        ("import subprocess\nsubprocess.run(['true'])", "code_raised"),
        ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "code_raised"),
    ],
)
def test_code_that_misbehaves_fails_with_its_reason(code: str, reason: str) -> None:
    assert run_code(f"```python\n{code}\n```") == RewardResult.failure(reason)


def test_code_that_never_ends_fails_at_its_limit() -> None:
    assert run_code("```python\nwhile True: pass\n```", timeout_seconds=0.5).failed == "code_timeout"
    assert asyncio.run(python_tests(answered("no code", tests=TESTS))).failed == "no_code"


def test_code_writes_to_its_folder_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    tests = ["open('inside', 'w').write('x')", f"open({str(outside)!r}, 'w')"]
    assert run_code("return a", tests=tests).components["passed"] == 1.0
    assert not outside.exists()


def test_code_without_a_sandbox_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(RewardError) as caught:
        run_code("return a + b")
    assert caught.value.reason == "sandbox_unavailable"


def test_a_composed_reward_is_the_weighted_sum_and_keeps_its_parts() -> None:
    found = [RewardResult(1.0, {"length": 3.0}), RewardResult.failure("no_number")]
    result = combined([("form", 0.25), ("right", 2.0)], found, failure_reward=-1.0)
    assert result == RewardResult(-1.75, {"form": 1.0, "form.length": 3.0, "right": -1.0})


def test_one_void_part_voids_the_whole() -> None:
    with pytest.raises(RewardError) as caught:
        combined([("a", 1.0), ("b", 1.0)], [RewardResult(1.0), RewardError("judge_unavailable", "x")], 0.0)
    assert caught.value.reason == "judge_unavailable" and "part 'b'" in caught.value.detail


@pytest.mark.parametrize(("weight", "values"), [(1.0, (1e308, 1e308)), (10.0, (1e308, -1e308))])
def test_a_weighted_sum_beyond_a_float_has_a_reason(weight: float, values: tuple[float, float]) -> None:
    with pytest.raises(RewardError, match="reward_not_finite"):
        combined([("a", weight), ("b", weight)], [RewardResult(v) for v in values], 0.0)


JUDGE = {"base_url": "http://h/v1", "model": "m"}


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("numeric", {"answer": "x"}, "argument 'answer'.*valid number"),
        (
            "numeric",
            {"answer": 1, "tol": 1},
            "argument 'tol'.*it takes: answer, tolerance, relative_tolerance",
        ),
        ("numeric", {"answer": 1, "tolerance": -1}, "argument 'tolerance'.*greater than or equal to 0"),
        ("exact_match", {"strip": True}, "argument 'answer': Field required"),
        ("regex", {"pattern": "("}, "no regular expression"),
        ("regex", {"pattern": "(a)", "group": 2, "answer": "a"}, "no group 2"),
        ("regex", {"pattern": "(a)", "group": 1}, "group and answer go together"),
        ("json_schema", {"schema": {"type": "objekt"}}, r"argument 'schema': no JSON schema, at \$\.type"),
        ("json_schema", {"shema": {}}, "it takes: schema"),
        ("python_tests", {"tests": []}, "argument 'tests'"),
        ("python_tests", {"tests": ["assert ("]}, r"tests\[0\] is no Python"),
        ("llm_judge", {**JUDGE, "prompt": "x"}, "neither {rollout} nor {answer}"),
        ("llm_judge", {**JUDGE, "base_url": "h"}, "no http"),
        ("llm_judge", {**JUDGE, "api_key_env": "NO_SUCH_KEY_HERE"}, "NO_SUCH_KEY_HERE is not set"),
        ("llm_judge", {**JUDGE, "pattern": "x"}, "needs a group"),
        ("composed", {}, "argument 'parts'"),
        ("composed", {"parts": {"a": {"reward": "nope"}}}, "part 'a'.*neither built in"),
        ("composed", {"parts": {"a": {"reward": "numeric", "args": {"answer": "x"}}}}, "part 'a'.*'answer'"),
    ],
)
def test_a_wrong_argument_is_named_at_load(name: str, args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_reward(name, args)
