"""A list of samples that is too long for the weight record lies beside it, and a step is redone from there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from test_trainer_redo import killed_at, uninterrupted
from trainer_world import POLICY, World

from headrace.consumers.trainer.sample_list import INLINE_SAMPLES, decode_refs, encode_refs, samples_of
from headrace.schemas.errors import InvalidMessageError
from headrace.schemas.score import Ref
from headrace.schemas.topics import WEIGHTS as WEIGHTS_TOPIC
from headrace.schemas.weights import WEIGHTS, BlobKind, WeightBlob, WeightRecord
from headrace.streams.blobs import BlobStore

BLOB = WeightBlob(kind=BlobKind.ANCHOR, uri="weights/none", size=1, sha256="0" * 64)


def size_with(count: int) -> int:
    record = WeightRecord(
        policy_id=POLICY,
        version=1,
        base_version=None,
        base_hash=None,
        weights_hash=1,
        blobs=(BLOB,),
        samples=tuple(Ref(i % 4, 2**40 + i) for i in range(count)),
    )
    return len(WEIGHTS.encode(record))


def test_a_record_with_as_many_as_go_inside_is_far_below_the_topics_limit() -> None:
    limit = int(WEIGHTS_TOPIC.configs["max.message.bytes"])
    each = (size_with(20_000) - size_with(10_000)) / 10_000
    assert 12 <= each < 12.5
    assert size_with(INLINE_SAMPLES) < limit / 32
    assert 650_000 < limit / each < 700_000


def test_a_list_comes_back_in_its_order_and_anything_else_is_refused() -> None:
    refs = (Ref(3, 2**40), Ref(0, 0), Ref(3, 7))
    data = encode_refs(refs)
    assert decode_refs(data) == refs
    assert decode_refs(encode_refs(())) == ()
    for broken in (b"", b"nothing", data[: len(data) // 2], size_with(1).to_bytes(8, "little")):
        with pytest.raises(InvalidMessageError):
            decode_refs(broken)
    with pytest.raises(InvalidMessageError):
        decode_refs(encode_refs((Ref(0, -1),)))


def test_a_step_is_redone_from_a_list_beside_the_record(broker: Any, namespace: str, tmp_path: Path) -> None:
    world = World(broker.config, namespace, tmp_path, steps=3)
    world.feed(24)
    status, log = killed_at(world, "committed", 3, "few")
    assert status == -signal.SIGKILL, log
    assert "step redone from the log version=2" in world.run()
    versions, store = world.versions(), BlobStore(world.config.store_uri)
    assert [len(v.samples) for v in versions] == [0, 0, 0, 8]
    assert [v.trained for v in versions] == [0, 8, 8, 8]
    assert [len(samples_of(v, store)) for v in versions] == [0, 8, 8, 8]
    assert [v.weights_hash for v in versions] == uninterrupted(world)
