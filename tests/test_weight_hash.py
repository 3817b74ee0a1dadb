"""Rolling hashes: equal to the definition, to a full recompute after any change, and sensitive to every bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas import weight_hash
from headrace.schemas.weight_hash import entry_hash, replace_entry, set_hash, tensor_hash, update_hash

MASK = 2**64 - 1


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, 2**16 - 1), max_size=60))
def test_the_hash_is_the_sum_of_mixed_positions_and_bits(values):
    expected = sum(mix64(i << 16 | v) for i, v in enumerate(values)) & MASK
    assert tensor_hash(np.array(values, dtype=np.uint16)) == expected


def test_a_known_value_stays():
    assert tensor_hash(np.array([0, 1, 0x7FC0], dtype=np.uint16)) == (
        (mix64(0) + mix64(1 << 16 | 1) + mix64(2 << 16 | 0x7FC0)) & MASK
    )
    assert mix64(0) == 0xE220A8397B1DCDAF  # first output of the published splitmix64 from state 0


def test_chunks_make_no_difference(monkeypatch):
    bits = np.random.default_rng(0).integers(0, 2**16, 10_000, dtype=np.uint16)
    whole = tensor_hash(bits)
    monkeypatch.setattr(weight_hash, "_CHUNK", 77)
    assert tensor_hash(bits) == whole


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_an_update_equals_the_full_recompute(seed, share):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 2**16, 500, dtype=np.uint16)
    indices = np.flatnonzero(rng.random(500) < share)
    new = old.copy()
    new[indices] = rng.integers(0, 2**16, len(indices), dtype=np.uint16)
    assert update_hash(tensor_hash(old), indices, old[indices], new[indices]) == tensor_hash(new)


def test_every_single_bit_and_every_swap_changes_the_hash():
    bits = np.arange(64, dtype=np.uint16)
    whole = tensor_hash(bits)
    for i in range(64):
        for b in range(16):
            changed = bits.copy()
            changed[i] ^= 1 << b
            assert tensor_hash(changed) != whole
    assert tensor_hash(bits[::-1].copy()) != whole


def test_a_set_depends_on_names_and_shapes_and_not_on_order():
    a, b = np.arange(6, dtype=np.uint16), np.arange(4, dtype=np.uint16)
    total = set_hash({"a": a, "b": b})
    assert set_hash({"b": b, "a": a}) == total
    assert set_hash({"a": a.reshape(2, 3), "b": b}) != total
    assert set_hash({"x": a, "b": b}) != total
    assert set_hash({"a": a}) != total


def test_one_member_can_be_replaced():
    a, b, c = (np.full(5, v, dtype=np.uint16) for v in (1, 2, 3))
    total = replace_entry(set_hash({"a": a, "b": b}), "b", b.shape, tensor_hash(b), tensor_hash(c))
    assert total == set_hash({"a": a, "b": c})
    assert entry_hash("b", (5,), tensor_hash(c)) == set_hash({"b": c})
