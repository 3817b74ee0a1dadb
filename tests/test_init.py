"""`headrace init` and what reads its files: task files, model directories, the checks of `headrace up`."""

from __future__ import annotations

import json
import socket
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.deploy.init import TEMPLATES, write_templates
from headrace.deploy.model_dir import check_model_dir
from headrace.deploy.tasks import read_tasks
from headrace.deploy.up import check
from headrace.producers.environments.base import Observation, load_environment
from headrace.schemas.config_file import dump_config, load_config
from headrace.schemas.errors import ConfigError
from headrace.schemas.task import check_task
from headrace.schemas.trajectory import Split


def model_dir(tmp_path: Path, *, without: str = "", template: bool = True) -> Path:
    """Weights, and other files by name only, as the check looks at nothing else."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in {"config.json", "tokenizer.json"} - {without}:
        (directory / name).write_text("{}")
    if without != "model.safetensors":
        save_file({"w": np.zeros(8, np.float32)}, directory / "model.safetensors")
    if template:
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"}))
    return directory


def test_the_templates_are_valid_and_agree_with_the_defaults(tmp_path: Path) -> None:
    written = write_templates(tmp_path)
    assert {p.name for p in written} == set(TEMPLATES)
    config = load_config(tmp_path / "headrace.toml")
    # Commented keys are documented defaults: uncommenting them changes nothing.
    lines = (tmp_path / "headrace.toml").read_text().splitlines()
    uncommented = [
        line.removeprefix("# ")
        if line.startswith("# ") and " = " in line and "bootstrap" not in line
        else line
        for line in lines
    ]
    tomllib.loads("\n".join(uncommented))
    (tmp_path / "all.toml").write_text("\n".join(uncommented))
    assert load_config(tmp_path / "all.toml") == config


def test_the_whole_example_passes_the_checks_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    write_templates(tmp_path)
    model_dir(tmp_path)
    tasks = check(load_config(tmp_path / "headrace.toml"), [tmp_path])
    assert [t.split for t in tasks].count(Split.EVAL) == 1
    for task in tasks:
        check_task(task)


def test_up_leaves_the_folder_of_another_run_alone(tmp_path: Path) -> None:
    write_templates(tmp_path)
    model_dir(tmp_path)
    config = load_config(tmp_path / "headrace.toml", overrides={"policy.id": "mine"})
    config.run.dir.mkdir(parents=True)
    dump_config(config, config.run.dir / "config.json")
    with pytest.raises(ConfigError, match=r"holds another run: policy\.id is mine there"):
        check(load_config(tmp_path / "headrace.toml"), [tmp_path])


def test_the_example_environment_gives_a_second_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    write_templates(tmp_path)
    model_dir(tmp_path)
    config = load_config(
        tmp_path / "headrace.toml", overrides={"rollout.environment": "environment:SecondChance"}
    )
    task = check(config, [tmp_path])[0]
    factory = load_environment(config.rollout.environment)
    environment = factory(hint="again")
    assert environment.start(task) is None
    assert environment.step("Lyon", ()) == Observation(messages=({"role": "user", "content": "again"},))
    assert environment.step("Paris.", ()) is None
    assert getattr(environment, "stop_reason", None) == "right"
    wrong = factory()
    wrong.start(task)
    assert wrong.step("Lyon", ()) is not None and wrong.step("Nice", ()) is None
    assert getattr(wrong, "stop_reason", None) == "wrong_twice"


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"reward\.py exists and is left as it is"):
        write_templates(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["reward.py"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON"),
        ("[]", r"line 2 is not a JSON object"),
        ('{"promt": "x"}', r"line 2: unknown field 'promt'; did you mean 'prompt'\?"),
        ("{}", r"line 2: write exactly one of"),
        ('{"prompt": "x", "messages": []}', r"line 2: write exactly one of"),
        ('{"prompt": 3}', r'line 2, field "prompt": 3 should be a text'),
        ('{"messages": "hi"}', r'line 2, field "messages": "hi" should be a list'),
        ('{"messages": []}', r'line 2, field "messages"'),
        ('{"prompt": "x", "split": "test"}', r'line 2, field "split": "test" should be "train" or "eval"'),
        ('{"prompt": "x", "group_size": 0}', r'line 2, field "group_size": 0 should be a whole number'),
        ('{"prompt": "x", "group_size": true}', r'line 2, field "group_size"'),
        ('{"prompt": "x", "reward": {"nam": "y"}}', r'line 2, field "reward"'),
        ('{"prompt": "x", "id": "first"}', r'line 2, field "id": \'first\' is taken'),
        ('{"prompt": "x", "task_id": "first"}', r'line 2, field "task_id": \'first\' is taken'),
        ('{"prompt": "x", "task_id": "a", "id": "a"}', r'line 2: "id" and "task_id" are the same field'),
        ('{"prompt": "x", "task_id": []}', r'line 2, field "task_id": \[\] should be a text or a number'),
        (
            '{"messages": [{"role": "user"}]}',
            r'line 2, field "messages", message 1 has no "content": it has "role"',
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"rol": "user", "content": "x"}]}',
            r'line 2, field "messages", message 2 has no "role": is "rol" meant to be "role"\?',
        ),
        ('{"messages": [{"role": 1, "content": "x"}]}', r'line 2, field "messages", message 1: "role" is 1'),
        ('{"messages": ["hi"]}', r'line 2, field "messages", message 1: "hi" should be'),
    ],
)
def test_a_task_error_names_file_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "first", "prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        read_tasks(path, policy_id="p")
    assert str(path) in str(caught.value)


def test_a_byte_that_is_not_utf8_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"prompt": "\xc3\xbc"}\r\n\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl line 3 is not UTF-8: byte 0xff at position 13"):
        read_tasks(path, policy_id="p")


def test_a_task_is_named_by_id_or_task_id(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"task_id": 7, "prompt": "x"}\n')
    assert [t.task_id for t in read_tasks(path, policy_id="p")] == ["a", "7"]


def test_a_task_file_without_training_tasks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('\n{"prompt": "x", "split": "eval"}\n')
    with pytest.raises(ConfigError, match="no task to train on"):
        read_tasks(path, policy_id="p")
    with pytest.raises(ConfigError, match="does not exist"):
        read_tasks(tmp_path / "none", policy_id="p")


def test_fields_of_a_task_become_its_record(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    row = {
        "messages": [{"role": "user", "content": "ü"}],
        "reward": "numeric",
        "environment": "calculator",
        "environment_args": {"a": 1},
        "group_size": 4,
        "max_tokens": 9,
        "metadata": {"k": "v"},
    }
    path.write_text("\n" + json.dumps(row, ensure_ascii=False))
    (task,) = read_tasks(path, policy_id="p")
    assert (task.task_id, task.policy_id, task.group_size, task.max_tokens) == ("line-2", "p", 4, 9)
    assert json.loads(task.messages or "") == row["messages"]
    assert json.loads(task.reward_spec or "") == {"name": "numeric"}
    assert json.loads(task.metadata or "") == {"k": "v"} and task.split is Split.TRAIN


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("tokenizer.json", "lacks a tokenizer"),
        ("model.safetensors", r"lacks weights"),
        ("config.json", r"lacks config\.json"),
    ],
)
def test_a_model_directory_says_what_it_lacks(tmp_path: Path, without: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model_dir(model_dir(tmp_path, without=without), chat=True)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_truncated_weights_are_named(tmp_path: Path, kept: int) -> None:
    directory = model_dir(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=rf"the weights {path} cannot be read .*download it again"):
        check_model_dir(directory, chat=False)


def test_a_chat_template_is_asked_for_only_by_chat_tasks(tmp_path: Path) -> None:
    directory = model_dir(tmp_path, template=False)
    check_model_dir(directory, chat=False)
    with pytest.raises(ConfigError, match="chat template"):
        check_model_dir(directory, chat=True)
    (directory / "chat_template.jinja").write_text("x")
    check_model_dir(directory, chat=True)
    with pytest.raises(ConfigError, match="is not a directory"):
        check_model_dir(tmp_path / "none", chat=False)
    with pytest.raises(ConfigError, match=r"policy\.model is not set"):
        check_model_dir(None, chat=False)


def test_up_names_a_port_in_use(tmp_path: Path) -> None:
    write_templates(tmp_path)
    model_dir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = load_config(tmp_path / "headrace.toml", overrides={"engine.port": port})
        with pytest.raises(ConfigError, match=rf"engine\.port: port {port} .*choose another with --set"):
            check(config, [tmp_path])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("verify.reward", "reward:scor", "has no 'scor'"),
        ("verify.reward", "nowhere:f", "tried to import"),
        ("rollout.environment", "nowhere:E", "tried to import"),
    ],
)
def test_up_says_which_plug_in_cannot_be_loaded(tmp_path: Path, key: str, value: str, message: str) -> None:
    write_templates(tmp_path)
    model_dir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check(load_config(tmp_path / "headrace.toml", overrides={key: value}), [tmp_path])


ENVIRONMENT = "class E:\n    def __init__(self, size: int) -> None:\n        pass\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "exact_mach"}, r'line 2, field "reward": reward \'exact_mach\' is neither built in'),
        (
            {"reward": {"name": "numeric", "args": {"answer": "x"}}},
            r"line 2, field \"reward\": reward 'numeric': argument 'answer'",
        ),
        (
            {"reward": "regex"},
            r"line 2, field \"reward\": reward 'regex': argument 'pattern': Field required",
        ),
        ({"reward": "nowhere:f"}, r'line 2, field "reward": .*tried to import'),
        ({"environment": "calculater"}, r'line 2, field "environment": .*neither built in'),
        ({"environment": "sized_env:F"}, r'line 2, field "environment": .*has no \'F\''),
        ({"environment": "sized_env:E"}, r"line 2, .*missing a required argument: 'size' \(it takes: size\)"),
        (
            {"environment": "sized_env:E", "environment_args": {"sise": 1}},
            r"line 2, field \"environment\": environment 'sized_env:E': .*\(it takes: size\)",
        ),
        (
            {"environment_args": {"a": 1}},
            r'line 2, field "environment_args": .*unexpected keyword argument \'a\'',
        ),
    ],
)
def test_up_says_which_plug_in_of_a_task_cannot_be_used(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    write_templates(tmp_path)
    model_dir(tmp_path)
    (tmp_path / "sized_env.py").write_text(ENVIRONMENT)
    good = {"prompt": "x", "environment": "sized_env:E", "environment_args": {"size": 1}}
    (tmp_path / "tasks.jsonl").write_text(
        json.dumps(good) + "\n" + json.dumps({"prompt": "x", **fields}) + "\n"
    )
    with pytest.raises(ConfigError, match=message) as caught:
        check(load_config(tmp_path / "headrace.toml"), [tmp_path])
    assert str(tmp_path / "tasks.jsonl") in str(caught.value)
