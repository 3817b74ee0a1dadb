"""Release archives: the published sum, and unpacking that leaves nothing half done or outside."""

from __future__ import annotations

import errno
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from headrace.deploy.broker.checksum import check_sha512, parse_sha512
from headrace.deploy.broker.unpack import unpack_release
from headrace.schemas.errors import ConfigError

NAME = "kafka_2.13-9.9.9.tgz"
SUM = hashlib.sha512(b"release").hexdigest()


def _archive(folder: Path, *more: tarfile.TarInfo, top: str = "kafka/libs/a.jar") -> Path:
    path = folder / NAME
    with tarfile.open(path, "w:gz") as tar:
        jar = tarfile.TarInfo(top)
        jar.size = 3
        tar.addfile(jar, io.BytesIO(b"jar"))
        for member in more:
            tar.addfile(member)
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def _gpg(name: str) -> str:
    groups = [SUM[i : i + 8].upper() for i in range(0, 128, 8)]
    return f"{name}: " + "\n    ".join(" ".join(groups[i : i + 4]) for i in range(0, 16, 4)) + "\n"


@pytest.mark.parametrize("text", [_gpg(NAME), f"{SUM}  {NAME}\n", f"{SUM} *{NAME}", SUM])
def test_each_published_form_gives_the_sum(text: str) -> None:
    assert parse_sha512(text, NAME) == SUM


@pytest.mark.parametrize(
    "text", ["", "<html>404: none</html>", _gpg("other.tgz"), f"{SUM}  other.tgz", SUM[:-1]]
)
def test_no_sum_or_another_files_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SHA-512"):
        parse_sha512(text, NAME)


def test_one_changed_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b"release")
    check_sha512(path, SUM.upper())
    path.write_bytes(b"releasf")
    with pytest.raises(ConfigError, match="not what was published"):
        check_sha512(path, SUM)


def test_a_release_is_unpacked_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "data" / "9.9.9"
    assert unpack_release(_archive(tmp_path), target) == target
    assert (target / "libs" / "a.jar").read_bytes() == b"jar"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    "member",
    [
        _member("../outside"),
        _member("kafka/../../outside"),
        _member("kafka/link", tarfile.SYMTYPE, "../../outside"),
        _member("kafka/link", tarfile.SYMTYPE, "/etc/passwd"),
        _member("kafka/hard", tarfile.LNKTYPE, "../outside"),
        _member("kafka/device", tarfile.CHRTYPE),
    ],
)
def test_a_member_that_leads_outside_is_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with pytest.raises(ConfigError, match="unsafe"):
        unpack_release(_archive(tmp_path, member), tmp_path / "data" / "9.9.9")
    assert list((tmp_path / "data").iterdir()) == []


def test_a_cut_archive_and_one_of_something_else_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "data" / "9.9.9"
    with pytest.raises(ConfigError, match="no Apache Kafka release"):
        unpack_release(_archive(tmp_path, top="kafka/readme"), target)
    path = _archive(tmp_path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match="damaged"):
        unpack_release(path, target)
    assert list(target.parent.iterdir()) == []


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = _archive(tmp_path)
    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(ConfigError, match="no room"):
        unpack_release(path, tmp_path / "data" / "9.9.9")
    assert list((tmp_path / "data").iterdir()) == []
