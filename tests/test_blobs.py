"""The blob store: literal names under one root, whole blobs or none, and checked bytes on the way out."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

import pytest

from headrace.schemas.errors import BlobCorruptError, BlobError, BlobNotFoundError
from headrace.streams.blobs import BlobRef, BlobStore, memory_store


@pytest.fixture(params=["path", "uri", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    if request.param == "memory":
        return memory_store()
    return BlobStore(str(tmp_path / "blobs") if request.param == "path" else f"file://{tmp_path}/blobs")


def test_what_was_put_comes_back(store: BlobStore) -> None:
    data = os.urandom(5000)
    ref = store.put("weights/p/v1.bin", data)
    assert ref == BlobRef("weights/p/v1.bin", 5000, hashlib.sha256(data).hexdigest())
    assert store.get(ref) == data
    assert store.names("weights/p") == ["weights/p/v1.bin"]


def test_an_empty_blob_is_a_blob(store: BlobStore) -> None:
    assert store.get(store.put("empty", b"")) == b""


def test_a_blob_written_again_is_replaced(store: BlobStore) -> None:
    old = store.put("a", b"old")
    new = store.put("a", b"newer")
    assert store.get(new) == b"newer"
    with pytest.raises(BlobCorruptError):
        store.get(old)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../../x",
        "/etc/passwd",
        "a//b",
        "a/",
        "a/./b",
        "a\\b",
        "a\0b",
        "*",
        "a?",
        "~",
        "a b",
        "é",
        "a\n",
    ],
)
def test_a_name_that_is_no_plain_path_is_refused_everywhere(store: BlobStore, name: str) -> None:
    for use in (
        lambda: store.put(name, b"x"),
        lambda: store.get(BlobRef(name, 1, "0" * 64)),
        lambda: store.delete(name),
        lambda: store.names(name),
    ):
        with pytest.raises(BlobError, match="is not a plain path"):
            use()


def test_brackets_are_letters_and_never_a_pattern(store: BlobStore) -> None:
    one = store.put("run1/x", b"one")
    bracket = store.put("run[1]/x", b"bracket")
    assert store.get(one) == b"one"
    assert store.get(bracket) == b"bracket"
    assert store.names("run[1]") == ["run[1]/x"]
    store.delete("run[1]/x")
    assert store.names("run[1]") == []
    assert store.get(one) == b"one"


def test_what_is_missing_is_told_and_deleting_it_is_fine(store: BlobStore) -> None:
    with pytest.raises(BlobNotFoundError, match="nothing/here"):
        store.get(BlobRef("nothing/here", 1, "0" * 64))
    store.delete("nothing/here")
    assert store.names("nothing") == []


def test_a_deleted_blob_is_gone(store: BlobStore) -> None:
    ref = store.put("a/b", b"x")
    store.delete("a/b")
    with pytest.raises(BlobNotFoundError):
        store.get(ref)


@pytest.mark.parametrize(
    "change", [{"size": 4}, {"size": 2}, {"sha256": "0" * 64}, {"size": -1}, {"size": 1 << 60}]
)
def test_bytes_that_differ_from_the_reference_are_corrupt(
    store: BlobStore, change: dict[str, object]
) -> None:
    ref = dataclasses.replace(store.put("a", b"abc"), **change)  # type: ignore[arg-type]
    with pytest.raises(BlobCorruptError):
        store.get(ref)


def test_a_folder_is_not_a_blob(store: BlobStore) -> None:
    store.put("folder/x", b"x")
    with pytest.raises(BlobError):
        store.get(BlobRef("folder", 0, hashlib.sha256(b"").hexdigest()))


def test_unfinished_blobs_are_not_listed(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    store.put("a/b", b"x")
    (tmp_path / "a" / "c.12345678.part").write_bytes(b"half")
    assert store.names("a") == ["a/b"]


def test_a_write_that_fails_leaves_neither_the_blob_nor_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(str(tmp_path))
    store.put("a/b", b"old")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(BlobError, match="No space left"):
        store.put("a/b", b"new")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b").read_bytes() == b"old"


def test_a_link_out_of_the_store_is_the_owners_business_but_a_name_never_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    store = BlobStore(str(tmp_path / "store"))
    with pytest.raises(BlobError):
        store.get(BlobRef("../secret", 1, hashlib.sha256(b"s").hexdigest()))


def test_a_store_that_cannot_be_opened_says_so_without_the_secret() -> None:
    with pytest.raises(BlobError) as error:
        BlobStore("nosuch://user:hunter2@host/bucket")
    assert "hunter2" not in str(error.value)
    assert "store.uri" in str(error.value)


def test_a_root_that_cannot_be_written_is_a_blob_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(BlobError, match="cannot be written"):
        BlobStore(str(tmp_path / "file")).put("a", b"x")
