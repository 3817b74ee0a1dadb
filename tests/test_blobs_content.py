"""Blobs named by their content, from pieces and files, as mappings and files; and texts without credentials."""

from __future__ import annotations

import errno
import hashlib
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.schemas.errors import BlobCorruptError, BlobError, BlobNotFoundError, BlobUnavailableError
from headrace.streams import blobs
from headrace.streams.blob_errors import Redaction, blob_error
from headrace.streams.blobs import BlobRef, BlobStore, memory_store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return memory_store() if request.param == "memory" else BlobStore(str(tmp_path / "run[1]" / "blobs"))


def test_the_name_holds_the_hash_however_the_bytes_come(store: BlobStore, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    digest = hashlib.sha256(data).hexdigest()
    (tmp_path / "file").write_bytes(data)
    expected = BlobRef(f"weights/p/v1-{digest}", len(data), digest)
    assert (
        store.put_stream("weights/p/v1", [data[:7], memoryview(data)[7:500], bytearray(data[500:])])
        == expected
    )
    assert store.get(expected) == data
    store.delete(expected.name)
    assert store.put_file("weights/p/v1", tmp_path / "file") == expected
    store.delete(expected.name)
    assert store.put_content("weights/p/v1", data) == expected
    assert store.names("weights/p") == [expected.name]
    assert (tmp_path / "file").read_bytes() == data


def test_what_is_there_with_the_right_size_stays_as_it_is_and_the_wrong_size_is_mended(
    tmp_path: Path,
) -> None:
    store = BlobStore(str(tmp_path))
    ref = store.put_content("a", b"data")
    stamp = (tmp_path / ref.name).stat().st_ino
    store.put_content("a", b"data")
    store.put_stream("a", [b"data"])
    assert (tmp_path / ref.name).stat().st_ino == stamp
    (tmp_path / ref.name).write_bytes(b"dat")
    store.put_stream("a", [b"data"])
    assert store.get(ref) == b"data"


def test_pieces_that_break_off_leave_nothing(store: BlobStore) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the encoder broke")

    store.put("w/other", b"x")
    with pytest.raises(RuntimeError, match="the encoder broke"):
        store.put_stream("w/a", pieces())
    assert store.names("w") == ["w/other"]


def test_a_local_write_that_breaks_off_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blobs, "settle", full)
    store = BlobStore(str(tmp_path))
    for put in (store.put, lambda name, data: store.put_stream(name, [data])):
        with pytest.raises(
            BlobError, match=r"w/a cannot be written to .*No space left on device.*weights gc"
        ):
            put("w/a", b"x")
    assert list((tmp_path / "w").iterdir()) == []


def test_what_writers_that_died_left_is_found_once_it_is_old(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path / "run[1]"))
    store.put("w/a", b"x")
    part = tmp_path / "run[1]" / "w" / "b.12345678.part"
    part.write_bytes(b"half")
    os.utime(part, (1000, 1000))
    assert store.unfinished("w", before_s=999) == {}
    assert (
        store.unfinished("w", before_s=1001) == {"w/b.12345678.part": 4}
        and store.unfinished("no", before_s=1) == {}
    )
    store.delete("w/b.12345678.part")
    assert [p.name for p in part.parent.iterdir()] == ["a"]


def test_a_mapping_and_a_file_are_checked_like_bytes(store: BlobStore, tmp_path: Path) -> None:
    ref = store.put("w/a", b"abc")
    assert bytes(store.mapped(ref)) == b"abc" and bytes(store.mapped(store.put("w/e", b""))) == b""
    store.get_file(ref, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"abc"
    store.put("w/a", b"abd")
    for read in (store.get, store.mapped, lambda r: store.get_file(r, tmp_path / "bad")):
        with pytest.raises(BlobCorruptError, match="hash differs"):
            read(ref)
        with pytest.raises(BlobCorruptError, match="3 bytes, the record says 4"):
            read(BlobRef("w/a", 4, ref.sha256))
        with pytest.raises(BlobNotFoundError, match="weights gc"):
            read(BlobRef("w/none", 4, ref.sha256))
    assert not (tmp_path / "bad").exists() and sorted(p.name for p in tmp_path.glob("*.part")) == []


def test_a_large_blob_is_never_whole_in_memory(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    piece = bytes(range(256)) * 4096
    tracemalloc.start()
    try:
        ref = store.put_stream("w/a", (piece for _ in range(64)))
        view = store.mapped(ref)
        store.get_file(ref, tmp_path / "got")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert ref.size == len(view) == 64 * len(piece) == (tmp_path / "got").stat().st_size
    assert peak < ref.size / 3


def test_a_mapping_outlives_its_blob(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    view = store.mapped(store.put("w/a", b"abc"))
    store.delete("w/a")
    assert bytes(view) == b"abc" and view.readonly


def test_folders_named_run1_and_run_in_brackets_never_touch_each_other(tmp_path: Path) -> None:
    one, bracket = BlobStore(str(tmp_path / "run1" / "blobs")), BlobStore(str(tmp_path / "run[1]" / "blobs"))
    a, b = one.put_content("weights/p/v1", b"same"), bracket.put_stream("weights/p/v1", [b"same"])
    assert one.names("weights/p") == [a.name] and bracket.names("weights/p") == [b.name]
    bracket.delete(b.name)
    assert one.get(a) == b"same" and bracket.names("weights/p") == []
    one.delete(a.name)
    bracket.put("weights/p/v2", b"x")
    assert one.names("weights/p") == [] and bracket.names("weights/p") == ["weights/p/v2"]


def test_a_file_system_without_whole_puts_is_refused_at_the_start() -> None:
    with pytest.raises(BlobError, match="in one piece"):
        BlobStore("http://127.0.0.1:1/blobs")


def test_a_store_that_is_busy_is_tried_again_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    store = BlobStore(str(tmp_path), sleep=pauses.append)
    answers = [OSError(errno.EBUSY, "busy")]
    real = os.replace

    def busy(source: str, target: str) -> None:
        if answers:
            raise answers.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", busy)
    ref = store.put("a", b"x")
    assert store.get(ref) == b"x" and len(pauses) == 1
    answers.extend([OSError(errno.EBUSY, "busy")] * 9)
    with pytest.raises(BlobUnavailableError, match="busy"):
        store.put("b", b"x")
    assert len(pauses) == 3 and store.size("b") is None


def test_credentials_never_appear_in_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2/of+aws")
    redact = Redaction(
        {"key": "AKIAHUNTER2", "client_kwargs": {"aws_session_token": "hunter2token"}, "anon": "plain"}
    )
    text = redact(
        "sftp://me:hunter2@host/x?X-Amz-Signature=hunter2sig&a=1 with hunter2/of+aws, AKIAHUNTER2, hunter2token plain"
    )
    assert "hunter2" not in text.lower()
    assert text == "sftp://***@host/x?X-Amz-Signature=***&a=1 with ***, ***, *** plain"
    error = blob_error(OSError(5, "signed with hunter2/of+aws"), "writing", redact)
    assert error is not None and "hunter2" not in str(error)


def test_a_defect_of_the_program_is_not_taken_for_the_store() -> None:
    assert blob_error(TypeError("x"), "writing", Redaction()) is None
