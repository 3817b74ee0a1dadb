"""Which broker a run starts without a flag, and what it says about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.deploy.broker import choice
from headrace.deploy.broker.choice import broker_reason, choose_kind
from headrace.deploy.broker.data_dir import data_dir, fetched_release
from headrace.schemas.config import KafkaConfig
from headrace.schemas.config_file import load_config
from headrace.schemas.errors import ConfigError


def _release(folder: Path, version: str) -> Path:
    (folder / version / "libs").mkdir(parents=True)
    (folder / version / "libs" / f"kafka_2.13-{version}.jar").touch()
    return folder / version


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HEADRACE_DATA": str(tmp_path)}


@pytest.fixture
def java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_java", lambda: Path("/j/bin/java"))
    monkeypatch.setattr(choice, "java_title", lambda java: "Java 17 on PATH")


@pytest.mark.usefixtures("java")
def test_the_newest_fetched_release_is_used_and_named(tmp_path: Path, env: dict[str, str]) -> None:
    for version in ("4.9.0", "4.10.0", "4.10.0-rc1"):
        _release(tmp_path / "kafka", version)
    (tmp_path / "kafka" / "4.99.0").mkdir()
    (tmp_path / "kafka" / ".5.0.0-x" / "libs").mkdir(parents=True)
    newest = tmp_path / "kafka" / "4.10.0"
    assert fetched_release(env) == newest and choose_kind(KafkaConfig(), env) == ("kafka", newest)
    said = broker_reason(KafkaConfig(nodes=3), env)
    assert said == f"Apache Kafka 4.10.0 from {newest} (fetched), Java 17 on PATH, 3 nodes"


@pytest.mark.usefixtures("java")
def test_what_is_set_comes_before_what_was_fetched(tmp_path: Path, env: dict[str, str]) -> None:
    _release(tmp_path / "kafka", "4.3.1")
    env["KAFKA_HOME"] = "/k"
    assert choose_kind(KafkaConfig(), env) == ("kafka", Path("/k"))
    assert choose_kind(KafkaConfig(kafka_home=Path("/h")), env) == ("kafka", Path("/h"))
    assert choose_kind(KafkaConfig(broker="embedded"), env) == ("embedded", None)


def test_a_fetched_release_without_java_gives_way_to_the_embedded_broker_and_says_so(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Path:
        raise ConfigError("needs Java 17")

    monkeypatch.setattr(choice, "find_java", none)
    release = _release(tmp_path / "kafka", "4.3.1")
    assert choose_kind(KafkaConfig(), env) == ("embedded", None)
    assert "4.3.1 was fetched, but needs Java 17" in broker_reason(KafkaConfig(), env)
    assert choose_kind(KafkaConfig(broker="kafka"), env) == ("kafka", release)


def test_with_nothing_the_reason_names_the_way(env: dict[str, str]) -> None:
    assert "headrace broker fetch" in broker_reason(KafkaConfig(), env)
    assert broker_reason(KafkaConfig(bootstrap="h:1"), env) == "the broker at h:1"
    with pytest.raises(ConfigError, match="headrace broker fetch"):
        broker_reason(KafkaConfig(broker="kafka"), env)


def test_the_data_folder_follows_the_environment_and_is_no_setting(tmp_path: Path) -> None:
    assert data_dir({"HEADRACE_DATA": "/d", "XDG_DATA_HOME": "/x"}) == Path("/d")
    assert data_dir({"XDG_DATA_HOME": "/x"}) == Path("/x/headrace")
    assert data_dir({}) == Path.home() / ".local" / "share" / "headrace"
    load_config(env={"HEADRACE_DATA": str(tmp_path)})
