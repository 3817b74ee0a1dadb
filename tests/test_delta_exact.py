"""Two hundred updates of mixed density in every format: by chain, by composition and from an anchor the bits are equal.
And ten thousand broken blobs, of which not one gets as far as a weight."""

import json
import os
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from headrace.schemas.delta import (
    apply_update,
    compose,
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

UPDATES = 200
MUTATIONS = int(os.environ.get("HEADRACE_MUTATIONS", "2000"))
MIB = 1 << 20
SPECIAL = {
    Dtype.BF16: [0, 0x8000, 1, 0x8001, 0x7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FFF, 0xFFC1, 0x3F80],
    Dtype.FP16: [0, 0x8000, 1, 0x8001, 0x3FF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0x7FFF, 0xFE01, 0x3C00],
    Dtype.FP32: [0, 1 << 31, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFFFFFFF],
}
"""±0, denormals, ±infinity, NaNs with payloads, one."""


def copy(weights):
    return {name: bits.copy() for name, bits in weights.items()}


def changed(weights, dtype, rng):
    """`weights` after an update in which none, few, many or all elements of each tensor change."""
    new = copy(weights)
    for bits in new.values():
        flat = bits.reshape(-1)
        where = np.flatnonzero(rng.random(len(flat)) < rng.choice([0.0, 0.01, 0.1, 0.6, 1.0]))
        steps = rng.choice(np.array([1, 2, 200, -1], dtype=np.int64), len(where)).astype(flat.dtype)
        special = rng.choice(np.array(SPECIAL[dtype], dtype=flat.dtype), len(where))
        flat[where] = np.where(rng.random(len(where)) < 0.2, special, flat[where] + steps)
    return new


@pytest.mark.parametrize("dtype", Dtype)
def test_chain_composition_and_anchor_end_at_the_same_bits(dtype):
    rng = np.random.default_rng(5)
    most = np.iinfo(dtype.bits).max
    truth = {
        name: rng.integers(0, most, shape, dtype=dtype.bits, endpoint=True)
        for name, shape in (("wide", (64, 33)), ("norm", (64,)), ("scalar", ()), ("none", (0, 4)))
    }
    dtypes = dict.fromkeys(truth, dtype)
    chain, composed, late = copy(truth), copy(truth), None
    waiting, since_anchor, hashes = [], [], None
    for version in range(1, UPDATES + 1):
        new = changed(truth, dtype, rng)
        made = encode_delta(
            truth, new, base_version=version - 1, version=version, base_hashes=hashes, dtypes=dtypes
        )
        update = decode_delta(made.blob, chain, base_version=version - 1, dtypes=dtypes)
        apply_update(chain, update)
        truth, hashes = new, made.hashes
        waiting.append(update)
        since_anchor.append(update)
        if version % 50 == 0:
            blob = encode_anchor(truth, version, dtypes=dtypes)
            since_anchor = [decode_anchor(blob, version=version, dtypes=dtypes)]
        if rng.random() < 0.2 or version == UPDATES:
            apply_update(composed, compose(waiting))
            waiting = []
        assert set_hash(chain, dtypes=dtypes) == made.weights_hash == update.weights_hash
    late = weights_of(compose(since_anchor))
    wanted = set_hash(truth, dtypes=dtypes)
    for name, found in (("chain", chain), ("composition", composed), ("anchor", late)):
        assert set_hash(found, dtypes=dtypes) == wanted, name
        for tensor, bits in truth.items():
            assert found[tensor].tobytes() == bits.tobytes(), (name, tensor)


def with_rows(blob, change):
    """`blob` with its rows passed through a change; a change that pyarrow cannot write is no blob at all."""
    with pa.ipc.open_stream(blob) as reader:
        schema, batches = reader.schema, list(reader.iter_batches_with_custom_metadata())
    rows = [row for batch, _ in batches for row in batch.to_pylist()]
    change(rows)
    totals = json.loads(batches[-1][1][b"totals"]) | {"rows": len(rows)}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        writer.write_batch(batch, custom_metadata={"totals": json.dumps(totals)})
    return sink.getvalue().to_pybytes()


def broken(rng, blob, others, bombs):
    """`blob`, broken in one of the ways that stores, networks and attackers have."""
    data = bytearray(blob)

    def row(rows):
        return rng.choice(rows)

    def swap(rows):
        a, b = row(rows), row(rows)
        at = rng.randrange(len(a["frames"]))
        a["frames"][at] = rng.choice(b["frames"])
        a["nnz"] += rng.randrange(3)

    match rng.randrange(10):
        case 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            at = rng.randrange(len(data))
            del data[at : at + rng.randrange(1, 64)]
        case 3:
            return rng.choice(others)
        case 4:
            return with_rows(blob, lambda rows: row(rows).update(shape=[rng.randrange(1 << 40)]))
        case 5:
            return with_rows(blob, lambda rows: row(rows).update(flat_offset=rng.randrange(1, 1 << 62)))
        case 6:
            return with_rows(blob, lambda rows: rows.append(row(rows)))
        case 7:
            return with_rows(blob, lambda rows: put(rng, row(rows), rng.choice(bombs)))
        case 8:
            return with_rows(blob, swap)
        case 9:
            gaps = deflate(bytes(rng.randrange(255) for _ in range(rng.randrange(1, 400))))
            return with_rows(blob, lambda rows: put(rng, row(rows), gaps, at=0))
    return bytes(data)


def put(rng, row, frame, at=None):
    row["frames"][rng.randrange(len(row["frames"])) if at is None else at] = frame
    row["nnz"] = rng.choice([row["nnz"], 1 << 40, max(1, len(frame) // 2)])


def test_no_broken_blob_gets_as_far_as_a_weight_or_takes_much_memory():
    rng, numbers = random.Random(7), np.random.default_rng(7)
    base = {
        "a": numbers.integers(0, 2**16, (60, 40), dtype=np.uint16),
        "b": numbers.integers(0, 2**16, (300,), dtype=np.uint16),
    }
    new = changed(base, Dtype.BF16, np.random.default_rng(1))
    new["b"] = new["b"] + np.uint16(1)
    third = changed(new, Dtype.BF16, np.random.default_rng(2))
    blob = encode_delta(base, new, base_version=0, version=1).blob
    others = [
        encode_delta(new, third, base_version=1, version=2).blob,
        encode_delta(third, base, base_version=0, version=1).blob,
        encode_anchor(new, 1),
        b"",
    ]
    bombs = [deflate(b"\x00" * size) for size in (1 << 20, 1 << 26, 1 << 28)]
    before = copy(base)
    wanted = {name: bits.tobytes() for name, bits in new.items()}
    refused = 0
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            data = broken(rng, blob, others, bombs)
            tracemalloc.reset_peak()
            held = tracemalloc.get_traced_memory()[0]
            try:
                update = decode_delta(data, base, base_version=0, version=1)
            except WeightUpdateError:
                refused += 1
            else:  # a byte that means nothing: the result must be the very one that was sent
                result = copy(base)
                apply_update(result, update)
                assert {name: bits.tobytes() for name, bits in result.items()} == wanted
            assert tracemalloc.get_traced_memory()[1] - held < 4 * MIB + 2 * len(data)
            assert all(np.array_equal(base[n], before[n]) for n in base), "the base is only read"
    finally:
        tracemalloc.stop()
    assert refused > 0.9 * MUTATIONS
