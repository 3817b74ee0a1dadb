"""Configuration: what overrides what, and errors that name the key, what is wrong, and what would be right."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from headrace.deploy.settings import load, load_running, parse_sets
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config, load_config
from headrace.schemas.errors import ConfigError


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "headrace.toml"
    path.write_text(text)
    return path


def test_the_defaults_are_valid_and_frozen() -> None:
    config = load_config()
    assert config == Config() and config.staleness.max_lag == 4
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1  # type: ignore[misc]


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, "[trainer]\nlr = 1e-3\nbatch_size = 3\nsteps = 3\n")
    env = {"HEADRACE_TRAINER__LR": "2e-3", "HEADRACE_TRAINER__BATCH_SIZE": "4", "HEADRACE_LOG_LEVEL": "x"}
    config = load_config(path, env=env, overrides={"trainer.lr": 5e-3, "trainer.steps": None})
    assert (config.trainer.lr, config.trainer.batch_size, config.trainer.steps) == (5e-3, 4, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[staleness]\nmax_lagg = 4\n",
            r"unknown key staleness\.max_lagg; did you mean staleness\.max_lag\?",
        ),
        ("[trainr]\nlr = 1\n", r"unknown key trainr; did you mean trainer\?"),
        ("[trainer]\nzzz = 1\n", r"unknown key trainer\.zzz; known: .*batch_size"),
        ("[trainer]\nlr = -1\n", r"trainer\.lr = -1: .*greater than 0"),
        ("[trainer]\nlr = 'fast'\n", r"trainer\.lr = 'fast': .*number"),
        ("[engine]\nport = 70000\n", r"engine\.port = 70000: .*65535"),
        ("[run]\nnamespace = 'a b'\n", r"run\.namespace is 'a b': use 1 to 80 letters"),
        ("[engine]\nkind = 'vllm2'\n", r"engine\.kind = 'vllm2': .*transformers"),
        ("[kafka]\nbootstrap = 'h:1,h:x'\n", r"kafka\.bootstrap = .*'h:x' is no address: write host:port\["),
        ("[kafka]\nbootstrap = 'nonsense'\n", r"'nonsense' is no address"),
        ("[kafka]\nbootstrap = 'h:70000'\n", r"'h:70000' is no address"),
        ("[kafka]\nbootstrap = ''\n", r"'' is no address"),
        ("trainer = 3\n", r"trainer = 3: "),
        ("[trainer\n", r"not valid TOML"),
    ],
)
def test_an_error_names_the_file_the_key_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_several_bootstrap_addresses_may_have_spaces_between_them() -> None:
    assert load_config(overrides={"kafka.bootstrap": "a:1, [::1]:2"}).kafka.bootstrap == "a:1,[::1]:2"


@pytest.mark.parametrize(
    ("env", "overrides", "message"),
    [
        (
            {},
            {"trainer.lrr": 1},
            r"^--set trainer\.lrr: unknown key trainer\.lrr; did you mean trainer\.lr\?$",
        ),
        ({}, {"trainer": {"lrr": 1}}, r"^--set trainer: unknown key"),
        ({}, {"trainr.lr": 1}, r"^--set trainr\.lr: unknown key trainr;"),
        ({}, {"staleness.admission_lag": 9}, r"^--set staleness\.admission_lag: staleness = .*above max_lag"),
        ({}, {"kafka.bootstrap": "x"}, r"^--bootstrap: kafka\.bootstrap = 'x': .*write host:port"),
        ({"HEADRACE_TRAINER__LRR": "1"}, {}, r"^HEADRACE_TRAINER__LRR: unknown key trainer\.lrr"),
        ({"HEADRACE_TRAINER__LR": "0"}, {"trainer.lr": -1}, r"^--set trainer\.lr: trainer\.lr = -1"),
        ({"HEADRACE_RUN__SEED__X": "1"}, {}, r"^HEADRACE_RUN__SEED__X: .*run\.seed is a value here"),
    ],
)
def test_an_error_names_the_flag_or_variable_that_it_came_from(
    tmp_path: Path, env: dict[str, str], overrides: dict[str, object], message: str
) -> None:
    path = toml(tmp_path, "[run]\nseed = 1\n")
    with pytest.raises(ConfigError, match=message):
        load_config(path, env=env, overrides=overrides, flags={"kafka.bootstrap": "--bootstrap"})


def test_an_error_in_the_file_names_the_file_beside_a_flag(tmp_path: Path) -> None:
    path = toml(tmp_path, "[trainer]\nlrr = 1\n")
    with pytest.raises(ConfigError, match=rf"^{path}: unknown key trainer\.lrr"):
        load_config(path, overrides={"trainer.lr": 1.0})


def test_an_option_that_was_not_given_leaves_its_set_alone(tmp_path: Path) -> None:
    config = load(toml(tmp_path, ""), ["trainer.steps=5"], overrides={"trainer.steps": None, "run.seed": 3})
    assert (config.trainer.steps, config.run.seed) == (5, 3)


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; `headrace init`"):
        load_config(tmp_path / "none.toml")


def test_a_flag_into_a_value_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lr\.x: trainer\.lr is a value here"):
        load_config(toml(tmp_path, "[trainer]\nlr = 1\n"), overrides={"trainer.lr.x": 1})


def test_relative_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    path = (
        Path(tmp_path.name)
        / toml(
            tmp_path, "[run]\ndir = 'r'\n[rollout]\ntasks = 't.jsonl'\n[policy]\nmodel = '/abs/model'\n"
        ).name
    )
    config = load_config(path, overrides={"kafka.kafka_home": "k"})
    assert config.run.dir == tmp_path / "r" and config.rollout.tasks == tmp_path / "t.jsonl"
    assert config.policy.model == Path("/abs/model") and config.kafka.kafka_home == tmp_path.parent / "k"


def test_a_dumped_configuration_reads_back_equal_and_is_private(tmp_path: Path) -> None:
    config = load_config(overrides={"kafka.sasl_password": "secret", "run.dir": "/r", "rollout.stop": ["]"]})
    path = tmp_path / "config.json"
    dump_config(config, path)
    assert load_config(path) == config
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" not in repr(config)


def test_sets_take_json_or_text() -> None:
    assert parse_sets(["a.b=1", "c=x y", "d=[1]", "e=true", "f=a=b"]) == {
        "a.b": 1,
        "c": "x y",
        "d": [1],
        "e": True,
        "f": "a=b",
    }
    with pytest.raises(ConfigError, match="key=value"):
        parse_sets(["novalue"])


def test_a_run_is_found_by_folder_by_file_or_as_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run to look at"):
        load_running(None, None)
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps({"kafka": {"bootstrap": "h:1"}}))
    assert load_running(None, None).kafka.bootstrap == "h:1"
    assert load_running(None, run_dir).kafka.bootstrap == "h:1"
    path = toml(tmp_path, "[run]\ndir = 'runs/one'\n")
    assert load_running(path, None).kafka.bootstrap == "h:1"
    assert load_running(None, None, ["kafka.bootstrap=other:2"]).kafka.bootstrap == "other:2"
    with pytest.raises(ConfigError, match="holds no run"):
        load_running(None, tmp_path / "elsewhere")
    assert load(None).run.dir == run_dir
