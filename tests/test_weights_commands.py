"""`headrace weights` on a trainer's versions: what it lists, checks, compacts, deletes and exports."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from weights_kit import Setup
from weights_world import POLICY, WeightsWorld, parameters_of

from headrace.deploy.cli import app
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.schemas.errors import BlobError, ConfigError
from headrace.schemas.score import Ref
from headrace.schemas.weights import BlobKind
from headrace.streams.blobs import BlobStore


@pytest.fixture
def world(embedded_broker: Any, namespace: str, tmp_path: Path) -> Iterator[WeightsWorld]:
    made = WeightsWorld(embedded_broker.config, namespace, tmp_path / "run[1]")
    yield made
    made.close()


def weights(world: WeightsWorld, *words: str, status: int = 0) -> dict[str, Any]:
    """What the command prints with --json."""
    done = CliRunner().invoke(app, ["weights", *words, "--run-dir", str(world.folder), "--json"])
    if isinstance(done.exception, ConfigError | BlobError):
        raise done.exception
    assert done.exit_code == status, done.output
    return json.loads(done.stdout)


def shown(world: WeightsWorld, *words: str) -> str:
    done = CliRunner().invoke(
        app, ["weights", *words, "--run-dir", str(world.folder)], env={"COLUMNS": "120"}
    )
    if isinstance(done.exception, ConfigError | BlobError):
        raise done.exception
    return done.output


def test_versions_are_listed_with_what_they_consist_of_and_what_is_missing(world: WeightsWorld) -> None:
    world.publish(6)
    gone = world.records[2].blobs_of(BlobKind.DELTA)[0].uri
    world.store.delete(gone)
    rows = weights(world, "ls")["versions"]
    assert [r["kind"] for r in rows] == ["anchor", "delta", "delta", "delta", "delta+anchor", "delta"]
    assert rows[1]["delta_bytes"] == world.records[1].blobs[0].size
    assert rows[1]["ratio"] == round(world.records[1].full_bytes / rows[1]["delta_bytes"], 1)
    assert rows[5]["weights_hash"] == f"{world.records[5].weights_hash:016x}"
    assert [r["missing"] for r in rows] == [[], [], [gone], [], [], []]
    assert [r["reachable"] for r in rows] == [True, True, False, False, True, True]
    assert [r["version"] for r in weights(world, "ls", "--limit", "2")["versions"]] == [4, 5]
    text = shown(world, "ls", "--limit", "5")
    assert "1 gone, out of reach" in text and "1 older ones are not shown" in text


def test_a_policy_without_versions_is_told(world: WeightsWorld) -> None:
    with pytest.raises(ConfigError, match="has no version: has the trainer of policy 'policy' started"):
        weights(world, "ls")


def test_all_blobs_are_checked_and_anchors_hold_what_the_deltas_lead_to(world: WeightsWorld) -> None:
    world.publish(6, samples=(Ref(0, 1),))
    found = weights(world, "verify")
    assert found["ok"] and found["problems"] == [] and found["collected"] == 0
    assert (found["versions"], found["chained"], found["anchors"], found["both_ways"]) == (6, 6, 2, 1)
    assert found["blobs"] == 6 + 6 + 1
    assert found["bytes"] == sum(b.size for r in world.records for b in r.blobs)


def test_what_is_broken_is_named_and_checking_goes_on_at_the_next_anchor(world: WeightsWorld) -> None:
    world.publish(7)
    (one,), (two,) = (world.records[v].blobs_of(BlobKind.DELTA) for v in (2, 6))
    flipped = bytearray(world.store.get(blob_ref(one)))
    flipped[-1] ^= 1
    world.store.put(one.uri, bytes(flipped))
    world.store.delete(two.uri)
    found = weights(world, "verify", status=1)
    assert not found["ok"] and len(found["problems"]) == 2
    assert f"version 2: blob {one.uri}: its hash differs" in found["problems"][0]
    assert f"version 6: {two.uri} is not in the store" in found["problems"][1]
    assert found["anchors"] == 2 and found["both_ways"] == 0


def test_an_anchor_with_other_bits_than_its_deltas_is_found(
    world: WeightsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(5)
    monkeypatch.setattr(
        "headrace.deploy.weights_verify.differing", lambda bits, update: ["model.norm.weight"]
    )
    found = weights(world, "verify", status=1)
    assert "anchor_differs" in found["problems"][0] and "model.norm.weight" in found["problems"][0]


def test_a_cleanup_is_only_told_until_it_is_confirmed(world: WeightsWorld) -> None:
    world.publish(11, samples=(Ref(0, 1),))
    before = world.blobs()
    planned = weights(world, "gc")
    assert not planned["deleted"] and planned["floor"] == 4 and world.blobs() == before
    assert planned == weights(world, "gc", "--dry-run")
    assert "would be deleted: 4 blobs" in shown(world, "gc")
    with pytest.raises(ConfigError, match="give one of them"):
        weights(world, "gc", "--yes", "--dry-run")
    done = weights(world, "gc", "--yes")
    assert done["deleted"] and done["names"] == planned["names"] and done["bytes"] == planned["bytes"]
    assert sorted(before) == sorted(world.blobs() + done["names"])
    assert sum("-samples-" in name for name in world.blobs()) == 11
    found = weights(world, "verify")
    assert found["ok"] and found["collected"] == 4 and found["both_ways"] == 1
    assert weights(world, "gc", "--yes")["names"] == []


def test_what_a_live_engine_needs_stays_until_it_has_been_silent(world: WeightsWorld) -> None:
    world.publish(11)
    world.engine(2)
    planned = weights(world, "gc")
    assert len(planned["names"]) == 3  # the anchor 0, the deltas 1 and 2
    assert "engine-2" in planned["holds"][0]["why"] and planned["holds"][0]["blobs"] == 1
    world.engine(2, age_s=1000)
    assert len(weights(world, "gc", "--engine-minutes", "15")["names"]) == 4
    kept = weights(world, "gc", "--engine-minutes", "15", "--keep", "2", "--keep", "9")
    assert kept["names"] == [world.records[3].blobs[0].uri]


def test_an_engine_behind_what_was_collected_goes_to_the_next_anchor(world: WeightsWorld) -> None:
    """Anchors 0 and 20, deltas 1 to 19 collected, an engine at 12: 20, and never 13 on a wrong base."""
    world.emitter = type(world.emitter)(world.store, POLICY, anchor_every=20)
    world.publish(13)
    setup = Following(world)
    setup.see(*world.records)
    assert setup.engine.version == 12
    world.publish(30)
    deleted = weights(world, "gc", "--yes")["names"]
    assert len(deleted) == 20 and {v for r in world.records[1:20] for b in r.blobs for v in [b.uri]} <= set(
        deleted
    )
    setup.see(*world.records[13:])
    assert setup.engine.version == 42
    assert setup.applied[0] == 12 and 13 not in setup.applied[1:] and min(setup.applied[1:]) >= 20
    assert setup.engine.weights_hash() == world.records[42].weights_hash


def test_blobs_that_no_record_names_stop_a_cleanup(world: WeightsWorld) -> None:
    world.publish(10)
    stray = world.store.put_content(f"weights/{POLICY}/v000003-delta", b"another run's").name
    newer = world.store.put_content(f"weights/{POLICY}/v000010-delta", b"on its way into the log").name
    assert weights(world, "gc")["orphans"] == {stray: 13}
    with pytest.raises(ConfigError, match=r"named by no record.*give each run its own store.uri"):
        weights(world, "gc", "--yes")
    weights(world, "gc", "--yes", "--orphans", "keep")
    assert {stray, newer} <= set(world.blobs())
    assert weights(world, "gc", "--yes", "--orphans", "delete")["names"] == [stray]
    assert newer in world.blobs() and stray not in world.blobs()


def test_a_cleanup_takes_what_a_killed_writer_left(world: WeightsWorld) -> None:
    world.publish(1)
    folder = world.folder / "blobs" / "weights" / POLICY
    for name, age_s in (("old", 90_000), ("new", 60)):
        part = folder / f"v000001-delta-{name}.part"
        part.write_bytes(b"half")
        os.utime(part, (time.time() - age_s, time.time() - age_s))
    assert weights(world, "gc", "--yes")["names"] == [f"weights/{POLICY}/v000001-delta-old.part"]
    assert [p.name for p in folder.glob("*.part")] == ["v000001-delta-new.part"]


def test_runs_named_alike_never_touch_each_other(
    embedded_broker: Any, namespace: str, tmp_path: Path
) -> None:
    bracket = WeightsWorld(embedded_broker.config, f"{namespace}a", tmp_path / "run[1]")
    plain = WeightsWorld(embedded_broker.config, f"{namespace}b", tmp_path / "run1")
    for world in (bracket, plain):
        world.publish(11)
        world.close()
    assert bracket.blobs() == plain.blobs()
    weights(bracket, "gc", "--yes")
    assert len(plain.blobs()) == len(bracket.blobs()) + 4
    assert weights(plain, "verify")["collected"] == 0 and weights(bracket, "verify")["collected"] == 4


def test_one_delta_stands_for_many_and_leads_to_the_same_bits(world: WeightsWorld, tmp_path: Path) -> None:
    world.publish(8)
    plain = weights(world, "export", str(tmp_path / "plain"), "--version", "7")
    made = weights(world, "compact")
    assert (made["first"], made["last"], made["replaces"]) == (4, 7, 3)
    assert made["name"].startswith(f"weights/{POLICY}/compact/v000004-v000007-")
    assert 0 < made["bytes"] < made["replaced_bytes"]
    by_jump = weights(world, "export", str(tmp_path / "jump"), "--version", "7")
    assert by_jump["weights_hash"] == plain["weights_hash"] and (plain["blobs"], by_jump["blobs"]) == (5, 3)
    assert [c["to"] for c in weights(world, "ls")["compacted"]] == [7]
    assert weights(world, "verify")["ok"]
    assert weights(world, "compact", "--from", "1", "--to", "6")["changed"] > 0
    with pytest.raises(ConfigError, match="--from must be below --to"):
        weights(world, "compact", "--from", "6", "--to", "6")
    world.publish(1)
    assert weights(world, "export", str(tmp_path / "eight"))["version"] == 8
    world.publish(5)
    deleted = weights(world, "gc", "--yes")["names"]
    assert sum("/compact/" in name for name in deleted) == 2


def test_a_compacted_delta_that_is_broken_is_found(world: WeightsWorld) -> None:
    world.publish(4)
    name = weights(world, "compact")["name"]
    world.store.put(name, b"x" * (world.store.size(name) or 0))
    assert f"the compacted delta {name}" in weights(world, "verify", status=1)["problems"][0]


def test_an_exported_version_loads_with_the_same_bits(world: WeightsWorld, tmp_path: Path) -> None:
    world.publish(6)
    for version in (5, 2):
        told = weights(world, "export", str(tmp_path / f"v{version}"), "--version", str(version))
        assert told["weights_hash"] == f"{world.records[version].weights_hash:016x}"
        loaded = parameters_of(tmp_path / f"v{version}")
        expected = world.bits[version]
        assert loaded.keys() == expected.keys()
        for name, values in loaded.items():
            assert np.array_equal(values.view(np.uint32) >> 16, expected[name].astype(np.uint32)), name
    config = json.loads((tmp_path / "v5" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert (tmp_path / "v5" / "tokenizer.json").read_text() == '{"a": "tokenizer"}'
    assert sorted(p.name for p in tmp_path.glob(".*")) == []


def test_what_cannot_be_exported_is_told_with_what_can(world: WeightsWorld, tmp_path: Path) -> None:
    world.publish(9)
    weights(world, "gc", "--yes")
    with pytest.raises(ConfigError, match="version 12 is not in the log"):
        weights(world, "export", str(tmp_path / "x"), "--version", "12")
    with pytest.raises(ConfigError, match=r"version 2 cannot be put together.*next that can is version 4"):
        weights(world, "export", str(tmp_path / "x"), "--version", "2")
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        weights(world, "export", str(tmp_path / "full"))
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_a_model_directory_of_another_shape_is_refused(world: WeightsWorld, tmp_path: Path) -> None:
    world.publish(1)
    config = json.loads((world.model / "config.json").read_text())
    (world.model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"not those of the model in .*mlp.*Set policy.model"):
        weights(world, "export", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


class Following(Setup):
    """The subscriber on the world's store, and the versions that its engine came to."""

    def __init__(self, world: WeightsWorld) -> None:
        self.applied: list[int] = []
        super().__init__(_Held(world.store), Noting(self.applied))  # type: ignore[arg-type]


class Noting(ScriptedEngine):
    def __init__(self, applied: list[int]) -> None:
        super().__init__()
        self._applied = applied

    def apply(self, update: Any) -> None:
        super().apply(update)
        self._applied.append(update.version)


class _Held:
    def __init__(self, store: BlobStore) -> None:
        self.store = store


def blob_ref(blob: Any) -> Any:
    from headrace.streams.blobs import BlobRef

    return BlobRef(blob.uri, blob.size, blob.sha256)
