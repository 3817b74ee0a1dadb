"""The blob store on a real S3 server: atomic, literal, bounded in retries and memory, clear when something fails."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest
from s3_server import SECRET, S3Server

from headrace.schemas.errors import BlobCorruptError, BlobError, BlobNotFoundError, BlobUnavailableError
from headrace.streams import blob_fs
from headrace.streams.blobs import BlobRef, BlobStore


@pytest.fixture
def store(s3: S3Server) -> BlobStore:
    return BlobStore(f"s3://{s3.bucket()}/runs/one", sleep=lambda _: None)


def bucket_of(store: BlobStore) -> str:
    return store._root.split("/")[0]


def test_what_was_put_comes_back_by_every_way(store: BlobStore, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    ref = store.put("weights/p/v1", data)
    assert store.get(ref) == data
    assert bytes(store.mapped(ref)) == data
    store.get_file(ref, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    assert store.names("weights/p") == ["weights/p/v1"]
    assert store.size("weights/p/v1") == len(data)
    assert store.size("weights/p/v2") is None and store.size("weights/p") is None


def test_a_large_file_goes_in_parts_and_comes_back_whole(
    store: BlobStore, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fs, "S3_CHUNK_BYTES", 5 * 2**20)
    data = os.urandom(2**20) * 13
    (tmp_path / "model").write_bytes(data)
    ref = store.put_file("weights/p/v1", tmp_path / "model")
    assert ref == BlobRef(
        f"weights/p/v1-{hashlib.sha256(data).hexdigest()}", len(data), hashlib.sha256(data).hexdigest()
    )
    assert sum(m == "PUT" for m, p in s3.requests if p.endswith(ref.name)) == 3
    assert bytes(store.mapped(ref)) == data


def test_an_upload_that_fails_half_way_leaves_nothing(
    store: BlobStore, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_fs, "S3_CHUNK_BYTES", 5 * 2**20)
    monkeypatch.setattr(store._fs, "retries", 1)
    (tmp_path / "model").write_bytes(os.urandom(2**20) * 13)
    parts: list[str] = []

    def third(method: str, path: str) -> bool:
        parts.extend([path] if method == "PUT" else [])
        return method == "PUT" and len(parts) > 2

    s3.refuse = third
    with pytest.raises(BlobUnavailableError, match=r"weights/p/v1.*cannot be written to s3://.*reduce"):
        store.put_file("weights/p/v1", tmp_path / "model")
    s3.refuse = None
    assert s3.keys(bucket_of(store)) == []
    assert "Uploads" not in s3.client().list_multipart_uploads(Bucket=bucket_of(store))


def test_content_that_is_there_is_not_sent_again(store: BlobStore, s3: S3Server) -> None:
    first = store.put_content("weights/p/v1", b"the same")
    sent = len([1 for m, _ in s3.requests if m == "PUT"])
    assert store.put_content("weights/p/v1", b"the same") == first
    assert store.put_stream("weights/p/v1", [b"the ", b"same"]) == first
    assert len([1 for m, _ in s3.requests if m == "PUT"]) == sent


def test_a_name_in_brackets_is_literal(s3: S3Server) -> None:
    bucket = s3.bucket()
    one, bracket = BlobStore(f"s3://{bucket}/run1"), BlobStore(f"s3://{bucket}/run[1]")
    a, b = one.put("w[1]/x", b"one"), bracket.put("w[1]/x", b"bracket")
    one.put("w1/x", b"other")
    assert (one.get(a), bracket.get(b)) == (b"one", b"bracket")
    assert bracket.names("w[1]") == ["w[1]/x"] and bracket.names("w1") == []
    bracket.delete("w[1]/x")
    assert s3.keys(bucket) == ["run1/w1/x", "run1/w[1]/x"]
    with pytest.raises(BlobNotFoundError):
        bracket.get(b)
    assert bytes(one.mapped(a)) == b"one"


def test_what_another_process_writes_is_seen_at_once(s3: S3Server) -> None:
    bucket = s3.bucket()
    reader, writer = BlobStore(f"s3://{bucket}"), BlobStore(f"s3://{bucket}")
    writer.put("w/a", b"a")
    assert reader.names("w") == ["w/a"]
    ref = writer.put("w/b", b"b")
    assert reader.names("w") == ["w/a", "w/b"] and reader.get(ref) == b"b"
    writer.put("w/b", b"longer")
    with pytest.raises(BlobCorruptError):
        reader.get(ref)


def test_a_few_503_are_waited_out(store: BlobStore, s3: S3Server) -> None:
    left = [1, 1]
    s3.refuse = lambda *_: bool(left and left.pop())
    ref = store.put("a", b"x")
    s3.refuse = None
    assert store.get(ref) == b"x" and not left


def test_a_store_that_stays_away_is_told_and_tried_a_bounded_number_of_times(
    store: BlobStore, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._fs, "retries", 1)
    ref = store.put("a", b"x")
    s3.refuse = lambda *_: True
    before = len(s3.requests)
    with pytest.raises(BlobUnavailableError, match=r"a cannot be read from s3://.*AWS_ENDPOINT_URL"):
        store.get(ref)
    s3.refuse = None
    assert 3 <= len(s3.requests) - before <= 9
    assert store.get(ref) == b"x"


def test_an_address_where_nothing_listens_is_unavailable(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(blob_fs, "S3_ATTEMPTS", 1)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(BlobUnavailableError, match="does not answer") as error,
    ):
        BlobStore("s3://bucket/x", sleep=lambda _: None).put("a", b"x")
    assert SECRET not in str(error.value) + caplog.text


def test_a_bucket_that_is_not_there_is_told_with_what_to_do(s3: S3Server) -> None:
    store = BlobStore("s3://no-such-bucket-here/x")
    with pytest.raises(BlobError, match=r"bucket.*does not exist.*create it"):
        store.put("a", b"x")
    with pytest.raises(BlobNotFoundError, match="s3://no-such-bucket-here"):
        store.get(BlobRef("a", 1, "0" * 64))


def test_missing_credentials_are_told_with_what_to_do(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(BlobError, match="Give credentials: AWS_ACCESS_KEY_ID"):
        BlobStore("s3://bucket").put("a", b"x")
