"""Deltas and anchors: every bit pattern survives, and whatever is not exactly right is refused before a write."""

import json
import random

import numpy as np
import pyarrow as pa
import pytest
from arrow_memory import watched_pool
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas import bitcodec
from headrace.schemas.delta import (
    DELTA_SCHEMA,
    apply_update,
    decode_anchor,
    decode_delta,
    encode_anchor,
    encode_delta,
    weights_of,
)
from headrace.schemas.dtypes import Dtype
from headrace.schemas.errors import WeightUpdateError
from headrace.schemas.frames import deflate
from headrace.schemas.weight_hash import set_hash

SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FFF, 0xFFC1, 0x3F80, 0xBF80],
    dtype=np.uint16,
)
"""±0, denormals, ±inf, NaN payloads, ±1."""


def copy(weights):
    return {name: bits.copy() for name, bits in weights.items()}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def moved(base, new, *, versions=(0, 1)):
    """`base` after the delta that leads to `new` went through bytes."""
    made = encode_delta(base, new, base_version=versions[0], version=versions[1])
    update = decode_delta(
        made.blob, base, base_version=versions[0], version=versions[1], weights_hash=made.weights_hash
    )
    result = copy(base)
    apply_update(result, update)
    assert made.weights_hash == set_hash(new)
    return result


def example(seed=0, change=0.05):
    rng = np.random.default_rng(seed)
    base = {
        "model.layers.0.weight": rng.integers(0, 2**16, (40, 30), dtype=np.uint16),
        "model.layers.1.weight": rng.integers(0, 2**16, (7, 3, 5), dtype=np.uint16),
        "norm": np.full(64, 0x3F80, dtype=np.uint16),
        "empty": np.empty((0, 4), dtype=np.uint16),
        "scalar": np.array(0x3F80, dtype=np.uint16),
    }
    new = copy(base)
    for bits in new.values():
        flat = bits.reshape(-1)
        where = rng.random(len(flat)) < change
        flat[where] += rng.integers(1, 4, int(where.sum()), dtype=np.uint16)
    return base, new


patterns = st.one_of(st.sampled_from([int(x) for x in SPECIAL]), st.integers(0, 2**16 - 1))


@given(st.lists(st.tuples(patterns, patterns), min_size=1, max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bit_pattern_becomes_any_other(pairs):
    old, new = (np.array(side, dtype=np.uint16) for side in zip(*pairs, strict=True))
    assert same(moved({"w": old}, {"w": new}), {"w": new})


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_of_every_size_come_back(gap):
    base = {"w": np.zeros(gap + 2, dtype=np.uint16)}
    new = copy(base)
    new["w"][[0, gap + 1]] = 1
    assert same(moved(base, new), new)
    last = copy(base)
    last["w"][gap] = 1
    assert same(moved(base, last), last)


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (lambda old, some: np.where(some < 0.01, old + 1, old), "gaps", "steps"),
        (lambda old, some: np.where(some < 0.01, 0x3F80, old), "gaps", "raw"),
        (lambda old, some: np.where(some < 0.01, old + 5000 + some * 1e5, old), "gaps", "planes"),
        (lambda old, some: np.where(some < 0.5, old + 1, old), "bitmap", "steps"),
        (lambda old, some: np.where(some < 0.4, 0, old), "bitmap", "raw"),
        (lambda old, some: old + 1, "all", "steps"),
        (lambda old, some: old + 300 + some * 90, "all", "planes"),
        (lambda old, some: np.zeros_like(old), "all", "raw"),
    ],
)
@pytest.mark.parametrize("size", [20_000, 200_000])
def test_the_smallest_form_is_chosen_and_exact(change, where, what, size):
    rng = np.random.default_rng(1)
    old = rng.integers(1000, 60000, size, dtype=np.uint16)
    new = change(old, rng.random(len(old))).astype(np.uint16)
    indices = np.flatnonzero(old != new)
    packed = bitcodec.pack(indices, new[indices], old, Dtype.BF16)
    assert (packed.where, packed.what) == (where, what)
    assert same(moved({"w": old}, {"w": new}), {"w": new})


def test_a_tensor_of_few_values_is_written_whole_where_most_of_it_changed():
    rng = np.random.default_rng(1)
    old, new = rng.choice(SPECIAL[:4], (2, 50_000))
    indices = np.flatnonzero(old != new)
    packed = bitcodec.pack(indices, new[indices], old, Dtype.BF16)
    assert (packed.where, packed.what) == ("all", "raw")
    assert same(moved({"w": old}, {"w": new}), {"w": new})


def test_a_small_change_of_large_weights_is_small():
    rng = np.random.default_rng(2)
    old = rng.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = old.copy()
    new[rng.choice(len(old), 10_000, replace=False)] += 1
    made = encode_delta({"w": old}, {"w": new}, base_version=3, version=4)
    assert made.changed == 10_000
    assert len(made.blob) < 0.016 * len(old)


def test_minus_zero_and_nan_payloads_count_as_changes():
    base = {"w": np.array([0x0000, 0x7FC0, 0x7FC0], dtype=np.uint16)}
    new = {"w": np.array([0x8000, 0x7FC0, 0x7FC1], dtype=np.uint16)}
    assert encode_delta(base, new, base_version=0, version=1).changed == 2
    assert same(moved(base, new), new)


def test_an_empty_delta_changes_nothing_and_keeps_the_hash():
    base, _ = example()
    made = encode_delta(base, base, base_version=4, version=5)
    update = decode_delta(made.blob, base, base_version=4, version=5)
    assert made.changed == 0 and update.patches == () and update.weights_hash == made.base_hash


def test_a_chain_of_updates_is_exact_at_every_step_and_so_are_its_hashes():
    rng = np.random.default_rng(3)
    truth, _ = example(3)
    replica, hashes, replica_hashes = copy(truth), None, None
    for version in range(1, 40):
        new = copy(truth)
        for bits in new.values():
            flat = bits.reshape(-1)
            where = rng.random(len(flat)) < rng.choice([0.0, 0.01, 0.3, 1.0])
            flat[where] = rng.choice([flat[where] + 1, rng.choice(SPECIAL, int(where.sum()))])
        made = encode_delta(truth, new, base_version=version - 1, version=version, base_hashes=hashes)
        update = decode_delta(made.blob, replica, base_version=version - 1, base_hashes=replica_hashes)
        apply_update(replica, update)
        truth, hashes = new, made.hashes
        replica_hashes = {**(replica_hashes or hashes), **update.hashes}
        assert same(replica, truth)
        assert made.weights_hash == set_hash(truth) == update.weights_hash
        assert replica_hashes == hashes


def refused(reason, blob, base, **expected):
    before = copy(base)
    with pytest.raises(WeightUpdateError) as e:
        decode_delta(blob, base, **{"base_version": 0, **expected})
    assert e.value.reason == reason, e.value
    assert same(base, before)
    return str(e.value)


def test_the_wrong_base_is_refused():
    base, new = example()
    made = encode_delta(base, new, base_version=0, version=1)
    refused("base_version", made.blob, base, base_version=1)
    refused("version", made.blob, base, version=2)
    refused("weights_hash", made.blob, base, weights_hash=made.weights_hash ^ 1)
    refused("base_hash", made.blob, new)
    renamed = {("Norm" if n == "norm" else n): b for n, b in base.items()}
    refused("base_hash", made.blob, renamed)


def rewritten(blob, change, metadata=lambda m: None):
    """`blob` with its rows and metadata passed through a change."""
    with pa.ipc.open_stream(blob) as reader:
        schema, batches = reader.schema, list(reader.iter_batches_with_custom_metadata())
    rows = [row for batch, _ in batches for row in batch.to_pylist()]
    change(rows)
    stated = {k.decode(): v.decode() for k, v in schema.metadata.items()}
    metadata(stated)
    totals = json.loads(batches[-1][1][b"totals"]) | {"rows": len(rows)}
    sink = pa.BufferOutputStream()
    schema = DELTA_SCHEMA.with_metadata(stated)
    with pa.ipc.new_stream(sink, schema) as writer:
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        writer.write_batch(batch, custom_metadata={"totals": json.dumps(totals)})
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("unknown_tensor", lambda rows: rows[0].update(name="model.layers.0.weigth")),
        ("shape", lambda rows: rows[0].update(shape=[30, 40])),
        ("shape", lambda rows: rows[0].update(flat_offset=1)),
        ("shape", lambda rows: rows[0].update(flat_offset=2**62, length=2**62)),
        ("dtype", lambda rows: rows[0].update(dtype="fp16")),
        ("codec", lambda rows: rows[0].update(dtype="fp8")),
        ("codec", lambda rows: rows[0].update(where="gzip")),
        ("not_a_delta", lambda rows: rows[0].update(length=-5)),
        ("nnz", lambda rows: rows[0].update(nnz=0)),
        ("nnz", lambda rows: rows[0].update(nnz=10_000)),
        ("nnz", lambda rows: rows[0].update(where="all")),
        ("gaps", lambda rows: rows[0].update(nnz=rows[0]["nnz"] + 1)),
        ("tensor_base_hash", lambda rows: rows[0].update(base_hash=1)),
        ("tensor_hash", lambda rows: rows[0].update(new_hash=1)),
        ("duplicate_tensor", lambda rows: rows.append(rows[0])),
        ("duplicate_tensor", lambda rows: rows.insert(0, rows[0])),
        ("result_hash", lambda rows: rows.pop()),
        ("frames", lambda rows: rows[0]["frames"].pop()),
        ("frames", lambda rows: rows[0].update(what="raw")),
        ("zstd", lambda rows: put(rows, 0, b"garbage")),
        ("zstd", lambda rows: put(rows, 3, rows[0]["frames"][3] + b"more")),
        ("content_size", lambda rows: put(rows, 0, deflate(b"\xff" * 5000))),
        ("content_size", lambda rows: put(rows, 4, deflate(b"ab"))),
        ("gaps", lambda rows: put(rows, 0, deflate(b"\xff" * 5))),
        ("gaps", lambda rows: put(rows, 0, deflate(b"\x00" * (rows[0]["nnz"] - 1)))),
        ("index_out_of_range", lambda rows: put(rows, 0, deflate(b"\xfe" * rows[0]["nnz"]))),
        ("steps", lambda rows: put(rows, 3, deflate(b"\xff" * -(-rows[0]["nnz"] // 3)))),
    ],
)
def test_a_delta_that_does_not_fit_is_refused(reason, change):
    base, new = example()
    blob = encode_delta(base, new, base_version=0, version=1).blob
    message = refused(reason, rewritten(blob, change), base)
    if reason == "unknown_tensor":
        assert "model.layers.0.weight" in message.split("nearest")[1]


def put(rows, at, frame):
    rows[0]["frames"][at] = frame


def test_a_frame_that_would_inflate_without_bound_is_refused_before_it_is():
    base, new = example()
    blob = encode_delta(base, new, base_version=0, version=1).blob
    bomb = deflate(b"\x00" * (1 << 28))
    assert len(bomb) < 1 << 16
    refused("content_size", rewritten(blob, lambda rows: put(rows, 3, bomb)), base)


def test_a_batch_that_arrow_compressed_is_refused_before_it_is_inflated():
    base, new = example()
    blob = encode_delta(base, new, base_version=0, version=1).blob
    with pa.ipc.open_stream(blob) as reader:
        batch, metadata = reader.read_next_batch_with_custom_metadata()
    rows = batch.to_pylist()
    rows[0]["frames"][0] = b"\x00" * (1 << 27)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=batch.schema), custom_metadata=metadata)
    bomb = sink.getvalue().to_pybytes()
    del rows, sink
    assert len(bomb) < 1 << 16
    with watched_pool() as pool:
        assert "compressed" in refused("not_a_delta", bomb, base)
    assert pool.max_memory() < 1 << 20
    refused("not_a_delta", bomb[: len(bomb) // 2], base)


def test_blobs_that_are_no_deltas_are_refused():
    base, new = example()
    blob = encode_delta(base, new, base_version=0, version=1).blob
    for data in (b"", b"x", blob[:-20], blob[: len(blob) // 2], encode_anchor(base, 0)):
        refused("not_a_delta", data, base)
    refused("format", rewritten(blob, lambda rows: None, lambda m: m.update(format="other/1")), base)
    refused("not_a_delta", rewritten(blob, lambda rows: None, lambda m: m.update(version="x")), base)


def test_random_mutations_are_refused_or_harmless():
    rng = random.Random(0)
    base, new = example(change=0.3)
    blob = encode_delta(base, new, base_version=0, version=1).blob
    outcomes = {"refused": 0, "harmless": 0}
    for _ in range(3000):
        data = bytearray(blob)
        for _ in range(rng.choice([1, 1, 1, 4])):
            match rng.randrange(4):
                case 0:
                    data[rng.randrange(len(data))] = rng.randrange(256)
                case 1:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                case 2:
                    at = rng.randrange(len(data))
                    del data[at : at + rng.randrange(1, 9)]
                case 3:
                    at = rng.randrange(len(data))
                    data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        before = copy(base)
        try:
            update = decode_delta(bytes(data), base, base_version=0, version=1)
        except WeightUpdateError:
            outcomes["refused"] += 1
        else:
            result = copy(base)
            apply_update(result, update)
            assert same(result, new)
            outcomes["harmless"] += 1
        assert same(base, before)
    assert outcomes["refused"] > 1000


def test_an_anchor_holds_everything_and_any_tool_can_read_it():
    import safetensors.torch
    import torch

    weights, _ = example()
    blob = encode_anchor(weights, 7)
    update = decode_anchor(blob, version=7, weights_hash=set_hash(weights))
    assert update.base_version is None and same(weights_of(update), weights)
    loaded = safetensors.torch.load(blob)
    for name, bits in weights.items():
        assert loaded[name].dtype is torch.bfloat16
        assert np.array_equal(loaded[name].view(torch.int16).numpy().view(np.uint16), bits)


def test_an_anchor_that_does_not_fit_is_refused():
    weights, _ = example()
    blob = encode_anchor(weights, 7)
    shapes = {name: bits.shape for name, bits in weights.items()}
    cases = [
        ("version", {"version": 8}),
        ("weights_hash", {"weights_hash": 1}),
        ("missing_tensor", {"shapes": {**shapes, "more": (1,)}}),
        ("unknown_tensor", {"shapes": {n: s for n, s in shapes.items() if n != "norm"}}),
        ("shape", {"shapes": {**shapes, "norm": (8, 8)}}),
    ]
    for reason, expected in cases:
        with pytest.raises(WeightUpdateError) as e:
            decode_anchor(blob, **expected)
        assert e.value.reason == reason


def test_random_mutations_of_an_anchor_are_refused_or_harmless():
    rng = random.Random(1)
    weights, _ = example()
    blob = encode_anchor(weights, 7)
    for _ in range(2000):
        data = bytearray(blob)
        at = rng.randrange(400) if rng.random() < 0.7 else rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        try:
            update = decode_anchor(bytes(data), version=7)
        except WeightUpdateError:
            continue
        assert same(weights_of(update), weights)


def test_tensors_must_be_the_same_on_both_sides():
    base, new = example()
    for broken in ({**new, "extra": new["norm"]}, {n: b for n, b in new.items() if n != "norm"}):
        with pytest.raises(WeightUpdateError):
            encode_delta(base, broken, base_version=0, version=1)
