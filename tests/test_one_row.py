"""The fast reader and writer agree with pyarrow: what they take, pyarrow takes too, with the same values."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import VALUES, mutations
from records import EXAMPLES, TYPES

from headrace.schemas.codec import RecordType
from headrace.schemas.errors import InvalidMessageError
from headrace.schemas.one_row import LayoutError, OneRow


def exact(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose equality means equal values and types; NaN equals itself."""

    def freeze(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return (str(value.dtype), value.tobytes())
        if isinstance(value, float):
            return struct.pack("<d", value)
        if isinstance(value, Mapping):
            return {k: freeze(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [freeze(v) for v in value]
        return value

    return {name: freeze(value) for name, value in row.items()}


def both(codec: RecordType[Any], value: bytes) -> bool:
    """Read `value` both ways: True when the fast reader took it, and then pyarrow did and found the same."""
    try:
        fast = exact(codec._one_row.read(value))
    except LayoutError:
        return False
    assert fast == exact(codec._row_of_any(value))
    return True


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_here_is_what_pyarrow_would_write(name: str) -> None:
    kind, record = EXAMPLES[name]
    codec = TYPES[kind]
    row = codec.to_row(record)
    fast, slow = codec._one_row.write(row), codec._encode_any(row)
    assert exact(codec._row_of_any(fast)) == exact(codec._row_of_any(slow))
    assert both(codec, fast) and both(codec, slow)


@given(st.sampled_from(VALUES), mutations())
@settings(max_examples=1500, deadline=None)
def test_what_the_fast_reader_takes_from_broken_bytes_pyarrow_takes_too(
    example: tuple[RecordType[Any], bytes], mutate: Any
) -> None:
    codec, value = example
    try:
        both(codec, mutate(value))
    except InvalidMessageError as e:
        pytest.fail(f"the fast reader took what pyarrow refuses: {e}")


def test_no_flipped_bit_and_no_wild_number_in_the_metadata_or_body_is_taken_wrongly() -> None:
    taken = 0
    rng = random.Random(7)
    wild = (-1, 1, 2, 7, 8, 9, 2**31, 2**62, -(2**63), 2**63 - 1)
    for codec, value in VALUES:
        start = len(codec._one_row.head)
        for _ in range(250):
            at = rng.randrange(start, len(value))
            flipped = bytearray(value)
            flipped[at] ^= 1 << rng.randrange(8)
            taken += both_or_refused(codec, bytes(flipped))
            word = bytearray(value)
            at = rng.randrange(start // 8, len(value) // 8) * 8  # both messages are multiples of 8 long
            word[at : at + 8] = struct.pack("<q", rng.choice(wild))
            both_or_refused(codec, bytes(word))
    assert taken > 100, "some changes of values are no faults: those must be read alike"


def both_or_refused(codec: RecordType[Any], value: bytes) -> bool:
    try:
        return both(codec, value)
    except InvalidMessageError as e:
        raise AssertionError(f"the fast reader took what pyarrow refuses: {e}") from None


SCHEMA = pa.schema(
    [
        pa.field("text", pa.string()),
        pa.field("small", pa.int32()),
        pa.field("big", pa.uint64()),
        pa.field("flag", pa.bool_()),
        pa.field("floats", pa.list_(pa.float32())),
        pa.field("flags", pa.list_(pa.bool_())),
        pa.field(
            "rows", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64()), ("on", pa.bool_())]))
        ),
        pa.field("words", pa.list_(pa.list_(pa.string()))),
        pa.field("inner", pa.struct([("ids", pa.list_(pa.int64())), ("at", pa.int64())])),
    ]
)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


ROWS = st.fixed_dictionaries(
    {
        "text": maybe(st.text()),
        "small": maybe(st.integers(-(2**31), 2**31 - 1)),
        "big": maybe(st.integers(0, 2**64 - 1)),
        "flag": maybe(st.booleans()),
        "floats": maybe(st.lists(st.floats(width=32)).map(lambda v: np.array(v, np.float32))),
        "flags": maybe(st.lists(st.booleans()).map(lambda v: np.array(v, bool))),
        "rows": maybe(
            st.lists(
                maybe(
                    st.fixed_dictionaries(
                        {
                            "name": maybe(st.text()),
                            "value": maybe(st.floats()),
                            "on": maybe(st.booleans()),
                        }
                    )
                ),
                max_size=12,
            )
        ),
        "words": maybe(st.lists(maybe(st.lists(maybe(st.text()), max_size=3)), max_size=3)),
        "inner": maybe(
            st.fixed_dictionaries(
                {"ids": maybe(st.lists(maybe(st.integers(-(2**63), 2**63 - 1)))), "at": maybe(st.just(5))}
            )
        ),
    }
)


@given(ROWS)
@settings(max_examples=300, deadline=None)
def test_any_row_of_any_kind_of_column_comes_back_and_pyarrow_reads_it(row: dict[str, Any]) -> None:
    codec: RecordType[Any] = RecordType(
        name="any", major=1, schema=SCHEMA, to_row=dict, from_row=dict, check=lambda _: None
    )
    assert exact(codec._one_row.read(codec._one_row.write(row))) == exact(row)
    assert exact(codec._row_of_any(codec._one_row.write(row))) == exact(row)
    assert exact(codec._row_of(codec._encode_any(row))) == exact(row)


@pytest.mark.parametrize(
    "change",
    [
        {"small": "5"},
        {"small": 2**31},
        {"text": 7},
        {"text": "\ud800"},
        {"flag": 1},
        {"floats": np.array([1.0])},
        {"rows": 3},
    ],
)
def test_a_value_of_another_type_is_left_to_pyarrow(change: dict[str, Any]) -> None:
    row = {name: None for name in SCHEMA.names} | change
    with pytest.raises(LayoutError):
        OneRow(SCHEMA).write(row)
