"""Environments: the built-in ones, and how one is found by name."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from headrace.producers.environments.base import Observation, environment_args, load_environment, settled
from headrace.producers.environments.calculator import Calculator, evaluate
from headrace.schemas.errors import ConfigError
from headrace.schemas.task import Task

TASK = Task(task_id="t", policy_id="p", prompt="47+38=")


def test_single_turn_is_over_after_one_turn() -> None:
    environment = load_environment("single_turn")()
    assert environment.start(TASK) is None
    assert environment.step("anything", ()) is None


def test_calculator_answers_a_call_and_is_over_after_the_second_turn() -> None:
    environment = load_environment("calculator")()
    assert environment.start(TASK) is None
    assert environment.step("[47+38]", ()) == Observation(text="85>")
    assert environment.step("[1+1]", ()) is None


@pytest.mark.parametrize(
    "call",
    [
        "47+38",
        "[47+38",
        "[47+]",
        "[47+38]]",
        " [47+38]",
        "[47/38]",
        "[1+1+1]",
        "[٤+٤]",
        "[__import__('os')]",
        "",
    ],
)
def test_a_malformed_call_ends_the_episode(call: str) -> None:
    environment = Calculator()
    assert environment.step(call, ()) is None
    assert environment.stop_reason == "malformed_call"


def test_evaluation_is_plain_arithmetic_on_bounded_numbers() -> None:
    assert evaluate("[9*9]") == 81
    assert evaluate("[3-8]") == -5
    assert evaluate(f"[{'9' * 19}+1]") is None


def test_an_environment_is_found_by_module_and_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_env.py").write_text("class Outer:\n  class Env:\n    pass\nnumber = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_environment("my_env:Outer.Env").__name__ == "Env"
    with pytest.raises(ConfigError, match=r"my_env was imported from .*has no 'Nothing'"):
        load_environment("my_env:Nothing")
    with pytest.raises(ConfigError, match="number is a int"):
        load_environment("my_env:number")
    sys.modules.pop("my_env")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("calculater", "neither built in nor module:attr.*calculator, single_turn"),
        ("nowhere.at_all:Env", "tried to import nowhere.at_all: ModuleNotFoundError"),
        (".relative:Env", "neither built in"),
    ],
)
def test_the_error_of_a_bad_name_says_what_was_tried(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_environment(name)


def test_a_module_that_breaks_while_it_is_imported_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_env.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="tried to import broken_env: ZeroDivisionError"):
        load_environment("broken_env:Env")


def test_a_tasks_own_arguments_win_and_another_environment_gets_none_of_the_configured() -> None:
    own = Task(task_id="t", policy_id="p", prompt="x", environment_args='{"a": 2}')
    assert environment_args(own, {"a": 1, "b": 1}) == {"a": 2, "b": 1}
    other = Task(task_id="t", policy_id="p", prompt="x", environment="m:E", environment_args='{"a": 2}')
    assert environment_args(other, {"b": 1}) == {"a": 2}
    with pytest.raises(ValueError, match="not a JSON object"):
        environment_args(Task(task_id="t", policy_id="p", prompt="x", environment_args="[1]"), {})


def test_an_observation_has_text_or_messages() -> None:
    with pytest.raises(ValueError, match="either text or messages"):
        Observation()


def test_sync_and_async_answers_are_alike() -> None:
    async def later() -> int:
        return 3

    assert asyncio.run(settled(later())) == asyncio.run(settled(3)) == 3
