"""Versions through an S3 store that fails: no half of one is ever seen, and everybody ends at the newest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server
from typer.testing import CliRunner
from weights_kit import Setup
from weights_world import WeightsWorld

from headrace.deploy.cli import app
from headrace.deploy.weights_log import read_catalog
from headrace.schemas.errors import BlobError, BlobUnavailableError
from headrace.streams import blob_fs
from headrace.streams.blobs import BlobStore


@pytest.fixture
def world(
    embedded_broker: Any, namespace: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightsWorld]:
    monkeypatch.setattr(blob_fs, "S3_ATTEMPTS", 1)
    monkeypatch.setattr("headrace.streams.blob_calls.RETRY_SECONDS", ())
    made = WeightsWorld(
        embedded_broker.config, namespace, tmp_path, store_uri=f"s3://{s3.bucket()}/runs/run[1]"
    )
    yield made
    made.close()


class Reader(Setup):
    """A subscriber with a client of its own."""

    def __init__(self, world: WeightsWorld) -> None:
        self.store = BlobStore(world.config.store_uri)
        super().__init__(self)  # type: ignore[arg-type]


def test_an_upload_that_keeps_failing_is_no_version_for_anybody(world: WeightsWorld, s3: S3Server) -> None:
    world.publish(2)
    stored = world.blobs()
    s3.refuse = lambda method, path: method == "PUT"
    with pytest.raises(BlobUnavailableError, match=r"v000002-delta.*cannot be written to s3://.*rate"):
        world.encode()
    s3.refuse = None
    assert world.blobs() == stored
    assert read_catalog(world.config, world.store).newest == 1
    reader = Reader(world)
    reader.see(*world.records)
    assert reader.engine.version == 1
    # The base has not moved: the next attempt goes on top of version 1.
    world.publish()
    reader.see(world.records[-1])
    assert reader.engine.version == 2 and reader.engine.weights_hash() == world.records[2].weights_hash


def test_an_upload_that_fails_for_a_while_is_tried_again(world: WeightsWorld, s3: S3Server) -> None:
    world.publish(1)
    left = [1, 1, 1]
    s3.refuse = lambda method, path: method == "PUT" and bool(left) and bool(left.pop())
    world.publish(1)
    assert not left and [r.version for r in read_catalog(world.config, world.store).records.values()] == [
        0,
        1,
    ]


def test_a_reader_whose_store_is_away_serves_on_and_ends_at_the_newest(
    world: WeightsWorld, s3: S3Server
) -> None:
    world.publish(2)
    reader = Reader(world)
    reader.see(*world.records)
    world.publish(3)
    s3.refuse = lambda method, path: True
    reader.subscriber.see(world.records[2:])
    for _ in range(12):
        reader.subscriber.follow()
        reader.clock.now += 5.0
        assert reader.engine.version == 1 and reader.engine.weights_hash() == world.records[1].weights_hash
    s3.refuse = None
    reader.clock.now += 60.0
    reader.settle()
    assert reader.engine.version == 4 and reader.engine.weights_hash() == world.records[4].weights_hash


def test_commands_work_on_it_and_tell_when_it_is_away(world: WeightsWorld, s3: S3Server) -> None:
    world.publish(10)

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["weights", *words, "--run-dir", str(world.folder), "--json"])

    assert json.loads(run("verify").stdout)["both_ways"] == 2
    assert len(json.loads(run("gc", "--yes").stdout)["names"]) == 4
    assert json.loads(run("verify").stdout)["collected"] == 4
    assert json.loads(run("compact").stdout)["last"] == 9
    s3.refuse = lambda method, path: True
    failed = run("ls").exception
    assert (
        isinstance(failed, BlobError)
        and "cannot be listed" in str(failed)
        and "AWS_ENDPOINT_URL" in str(failed)
    )


def test_the_topic_has_only_versions_whose_blobs_are_whole(world: WeightsWorld, s3: S3Server) -> None:
    world.publish(3)
    sizes = world.store.sizes("weights/policy")
    records = read_catalog(world.config, world.store).records
    assert {b.uri: b.size for r in records.values() for b in r.blobs} == sizes
