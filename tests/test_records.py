"""The records on the wire: what is written comes back, what breaks a rule says which, no bytes crash a reader.

HEADRACE_WRITE_GOLDEN=1 pytest tests/test_records.py writes tests/golden/ anew; a change there is a change of
format: readers of old topics must still take the old files, so add, and raise the major version where it breaks.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from arrow_memory import watched_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import VALUES, mutations
from records import (
    ENGINE_FULL,
    EXAMPLES,
    FEEDBACK_FULL,
    SAMPLE_DROPPED,
    SAMPLE_FULL,
    SCORE_FULL,
    SCORE_VOID,
    TASK_CHAT,
    TASK_RAW,
    TRAJECTORY_EMPTY,
    TRAJECTORY_FULL,
    TYPES,
    WEIGHTS_FULL,
    plain,
)

from headrace.schemas.codec import RecordType, header, version_headers
from headrace.schemas.errors import InvalidMessageError
from headrace.schemas.score import SCORE, Ref
from headrace.schemas.trajectory import TRAJECTORY, TrajectoryStatus, Turn, VersionSpan

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_written_comes_back(name: str) -> None:
    kind, record = EXAMPLES[name]
    again = TYPES[kind].decode(TYPES[kind].encode(record), [("schema", TYPES[kind].tag.encode())])
    assert plain(again) == plain(record)


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_files_decode_to_the_same_record_and_are_what_is_written_today(name: str) -> None:
    kind, record = EXAMPLES[name]
    path = GOLDEN / f"{name}.arrow"
    if os.environ.get("HEADRACE_WRITE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_bytes(TYPES[kind].encode(record))
    old = path.read_bytes()
    assert plain(TYPES[kind].decode(old)) == plain(record)
    with pa.ipc.open_stream(old) as reader:
        assert reader.schema.equals(TYPES[kind].schema, check_metadata=True), "the format has changed"
    assert plain(TYPES[kind].decode(TYPES[kind].encode(record))) == plain(TYPES[kind].decode(old))


@pytest.mark.parametrize(("name", "record"), [("score", SCORE_FULL), ("score_void", SCORE_VOID)])
def test_scores_from_before_there_were_turn_rewards_are_read(name: str, record: Any) -> None:
    assert plain(SCORE.decode((GOLDEN / f"before_turns_{name}.arrow").read_bytes())) == plain(record)


def test_engine_statuses_from_before_they_told_of_pauses_are_read() -> None:
    old = TYPES["engine"].decode((GOLDEN / "before_paused_engine.arrow").read_bytes())
    assert plain(old) == plain(dataclasses.replace(ENGINE_FULL, paused=None, held=None))


def test_arrays_that_were_read_cannot_be_written() -> None:
    again = TRAJECTORY.decode(TRAJECTORY.encode(TRAJECTORY_FULL))
    for column in (again.token_ids, again.loss_mask, again.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


T, SPANS, TURNS = TRAJECTORY_FULL, TRAJECTORY_FULL.version_spans, TRAJECTORY_FULL.turns
LP = T.logprobs.tolist()
BROKEN: list[tuple[str, Any, dict[str, Any], str]] = [
    ("trajectory", T, {"logprobs": T.logprobs[:8]}, "length_mismatch"),
    ("trajectory", T, {"loss_mask": T.loss_mask[:8]}, "length_mismatch"),
    (
        "trajectory",
        T,
        {"token_ids": T.token_ids[:5], "loss_mask": T.loss_mask[:5], "logprobs": T.logprobs[:4]},
        "length_mismatch",
    ),
    ("trajectory", T, {"rollout_id": ""}, "missing_id"),
    ("trajectory", T, {"group_size": 0}, "group_size"),
    ("trajectory", T, {"trajectory_index": 2}, "trajectory_index"),
    ("trajectory", T, {"trajectory_index": -1}, "trajectory_index"),
    ("trajectory", T, {"token_ids": ints(1, 2, 3, 4, 5, 6, 7, 8, 17)}, "token_out_of_range"),
    ("trajectory", T, {"token_ids": ints(-1, 2, 3, 4, 5, 6, 7, 8, 9)}, "token_out_of_range"),
    ("trajectory", T, {"logprobs": floats(*LP[:3], math.nan, *LP[4:])}, "logprob_not_finite"),
    ("trajectory", T, {"logprobs": floats(*LP[:3], -math.inf, *LP[4:])}, "logprob_not_finite"),
    ("trajectory", T, {"logprobs": floats(*LP[:3], 0.5, *LP[4:])}, "logprob_positive"),
    ("trajectory", T, {"logprobs": floats(-1, *LP[1:])}, "logprob_unmasked"),
    ("trajectory", T, {"logprobs": floats(math.nan, *LP[1:])}, "logprob_unmasked"),
    ("trajectory", T, {"version_spans": SPANS[:2]}, "version_spans"),
    ("trajectory", T, {"version_spans": SPANS[::-1]}, "version_spans"),
    ("trajectory", T, {"version_spans": (VersionSpan(3, 2, 9),)}, "version_spans"),
    ("trajectory", T, {"version_spans": (*SPANS, VersionSpan(4, 9, 10))}, "version_spans"),
    ("trajectory", T, {"version_spans": (VersionSpan(3, 2, 2), *SPANS)}, "version_spans"),
    ("trajectory", T, {"version_spans": (VersionSpan(-1, 2, 4), *SPANS[1:])}, "version_spans"),
    ("trajectory", T, {"turns": TURNS[:1]}, "turns"),
    ("trajectory", T, {"turns": (Turn(start=2, end=6, finish_reason="stop"), TURNS[1])}, "turns"),
    ("trajectory", TRAJECTORY_EMPTY, {"status": TrajectoryStatus.COMPLETED}, "empty"),
    (
        "trajectory",
        T,
        {
            "loss_mask": np.zeros(9, bool),
            "logprobs": np.zeros(9, np.float32),
            "version_spans": (),
            "turns": (),
        },
        "nothing_sampled",
    ),
    ("score", SCORE_FULL, {"reward": math.nan}, "reward_not_finite"),
    ("score", SCORE_FULL, {"reward": None}, "reward_not_finite"),
    ("score", SCORE_VOID, {"reward": 0.0}, "reward"),
    ("score", SCORE_VOID, {"reason": None}, "reason"),
    ("score", SCORE_FULL, {"ref": Ref(-1, 0)}, "ref"),
    ("score", SCORE_FULL, {"components": "{"}, "components"),
    ("score", SCORE_FULL, {"group_id": ""}, "missing_id"),
    ("score", SCORE_FULL, {"group_size": 0}, "group_size"),
    ("score", SCORE_FULL, {"trajectory_count": 0}, "trajectory_index"),
    ("sample", SAMPLE_FULL, {"advantage": None}, "advantage_not_finite"),
    ("sample", SAMPLE_FULL, {"advantage": math.inf}, "advantage_not_finite"),
    ("sample", SAMPLE_FULL, {"turn_advantages": np.array([math.nan])}, "advantage_not_finite"),
    ("sample", SAMPLE_FULL, {"sampled_tokens": 0}, "nothing_sampled"),
    ("sample", SAMPLE_FULL, {"reward": math.inf}, "reward_not_finite"),
    ("sample", SAMPLE_DROPPED, {"reason": None}, "reason"),
    ("sample", SAMPLE_FULL, {"trajectory_id": ""}, "missing_id"),
    ("feedback", FEEDBACK_FULL, {"value": math.nan}, "value_not_finite"),
    ("feedback", FEEDBACK_FULL, {"name": ""}, "missing_id"),
    ("feedback", FEEDBACK_FULL, {"metadata": "nope"}, "metadata"),
    ("task", TASK_RAW, {"prompt": None}, "prompt"),
    ("task", TASK_RAW, {"prompt": ""}, "prompt"),
    ("task", TASK_CHAT, {"prompt": "both"}, "prompt"),
    ("task", TASK_CHAT, {"messages": "["}, "messages"),
    ("task", TASK_CHAT, {"messages": "[" * 100_000}, "messages"),
    ("task", TASK_CHAT, {"group_size": 0}, "group_size"),
    ("task", TASK_CHAT, {"max_tokens": 0}, "max_tokens"),
    ("task", TASK_RAW, {"task_id": ""}, "missing_id"),
    ("weights", WEIGHTS_FULL, {"version": -1}, "version"),
    ("weights", WEIGHTS_FULL, {"base_version": 6}, "base_version"),
    ("weights", WEIGHTS_FULL, {"base_hash": None}, "base_hash"),
    ("weights", WEIGHTS_FULL, {"blobs": ()}, "blobs"),
    ("weights", WEIGHTS_FULL, {"blobs": WEIGHTS_FULL.blobs[:2]}, "shards"),
    ("weights", WEIGHTS_FULL, {"blobs": (dataclasses.replace(WEIGHTS_FULL.blobs[0], size=0),)}, "blob"),
    ("weights", WEIGHTS_FULL, {"samples": (Ref(0, -1),)}, "ref"),
    ("weights", WEIGHTS_FULL, {"policy_id": ""}, "missing_id"),
    ("engine", ENGINE_FULL, {"engine_id": ""}, "missing_id"),
    ("engine", ENGINE_FULL, {"version": -2}, "version"),
]


@pytest.mark.parametrize(("kind", "record", "change", "reason"), BROKEN)
def test_a_record_that_breaks_a_rule_is_neither_written_nor_read(
    kind: str, record: Any, change: dict[str, Any], reason: str
) -> None:
    broken, codec = dataclasses.replace(record, **change), TYPES[kind]
    with pytest.raises(InvalidMessageError) as written:
        codec.encode(broken)
    assert written.value.reason == reason
    with pytest.raises(InvalidMessageError) as read:
        codec.decode(dataclasses.replace(codec, check=lambda _: None).encode(broken))
    assert read.value.reason == reason


def stream(batch: pa.RecordBatch, times: int = 1) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def batch_of(name: str) -> tuple[RecordType[Any], pa.RecordBatch]:
    kind, record = EXAMPLES[name]
    with pa.ipc.open_stream(TYPES[kind].encode(record)) as reader:
        return TYPES[kind], reader.read_next_batch()


def reason_of(codec: RecordType[Any], value: bytes | None, *headers: tuple[str, bytes]) -> str:
    with pytest.raises(InvalidMessageError) as error:
        codec.decode(value, headers)
    return error.value.reason


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_added_nullable_column_is_left_out(name: str) -> None:
    codec, batch = batch_of(name)
    wider = batch.append_column(pa.field("new", pa.string()), pa.array([None], pa.string()))
    assert plain(codec.decode(stream(wider))) == plain(EXAMPLES[name][1])


@pytest.mark.parametrize("name", [n for n in EXAMPLES if "_" in n])
def test_an_absent_nullable_column_is_null(name: str) -> None:
    codec, batch = batch_of(name)
    needed = batch.select(
        [f.name for f in codec.schema if not f.nullable or batch.column(f.name).null_count == 0]
    )
    assert plain(codec.decode(stream(needed))) == plain(EXAMPLES[name][1])


@pytest.mark.parametrize("name", TYPES)
def test_an_absent_required_column_is_missed(name: str) -> None:
    codec, batch = batch_of(name)
    for field in codec.schema:
        if not field.nullable:
            narrower = batch.select([n for n in batch.schema.names if n != field.name])
            assert reason_of(codec, stream(narrower)) == "missing_column"


@pytest.mark.parametrize("name", TYPES)
def test_a_null_in_a_required_column_is_refused(name: str) -> None:
    codec, batch = batch_of(name)
    for i, field in enumerate(codec.schema):
        if not field.nullable:
            holed = batch.set_column(i, pa.field(field.name, field.type), pa.nulls(1, field.type))
            assert reason_of(codec, stream(holed)) in ("unexpected_null", "not_arrow")


@pytest.mark.parametrize("name", TYPES)
def test_a_column_of_another_type_is_refused(name: str) -> None:
    codec, batch = batch_of(name)
    for i, field in enumerate(codec.schema):
        other = pa.array([b"x"], pa.binary())
        assert reason_of(codec, stream(batch.set_column(i, field.name, other))) == "wrong_type"


@pytest.mark.parametrize("name", TYPES)
def test_a_newer_major_and_another_schema_are_refused(name: str) -> None:
    codec, batch = batch_of(name)
    value = stream(batch)
    assert reason_of(codec, value, ("schema", f"{name}/2".encode())) == "newer_major"
    assert reason_of(codec, value, ("schema", f"{name}/x".encode())) == "newer_major"
    assert reason_of(codec, value, ("schema", b"other/1")) == "wrong_schema"
    codec.decode(value, [("other", b"\xff"), ("schema", f"{name}/1".encode())])


@pytest.mark.parametrize("name", TYPES)
def test_a_value_that_is_not_one_row_in_one_batch_is_refused(name: str) -> None:
    codec, batch = batch_of(name)
    assert reason_of(codec, None) == "empty_value"
    assert reason_of(codec, b"") == "empty_value"
    assert reason_of(codec, b"not arrow") == "not_arrow"
    assert reason_of(codec, stream(batch, 0)) == "not_one_batch"
    assert reason_of(codec, stream(batch, 2)) == "not_one_batch"
    assert reason_of(codec, stream(batch.slice(0, 0))) == "not_one_row"
    two = pa.Table.from_batches([batch, batch]).combine_chunks().to_batches()[0]
    assert reason_of(codec, stream(two)) == "not_one_row"


def compressed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_writer_that_lets_arrow_compress_is_understood(name: str) -> None:
    codec, batch = batch_of(name)
    assert codec.encode(codec.decode(compressed(batch))) == codec.encode(codec.decode(stream(batch)))


def test_a_compressed_record_that_claims_too_much_is_refused_before_it_is_inflated() -> None:
    codec, batch = batch_of("trajectory")
    at = batch.schema.get_field_index("token_ids")
    zeros = pa.array([np.zeros(1 << 27, dtype=np.int32)], type=batch.schema.field(at).type)
    bomb = compressed(batch.set_column(at, batch.schema.field(at), zeros))
    del zeros
    assert len(bomb) < 1 << 17
    with watched_pool() as pool:
        assert reason_of(codec, bomb) == "too_large"
    assert pool.max_memory() < 1 << 20


def test_list_offsets_that_point_outside_are_refused_and_the_process_lives() -> None:
    """(0, 3, 6, 9) becomes (0, 3, 1000, 9) inside the payload: read unchecked, it is memory of someone else."""
    column = pa.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], pa.list_(pa.int32()))
    value = stream(pa.record_batch({"token_ids": column}))
    good, bad = (np.array(offsets, np.int32).tobytes() for offsets in ((0, 3, 6, 9), (0, 3, 1000, 9)))
    assert value.count(good) == 1
    assert reason_of(TRAJECTORY, value) == "not_one_row"
    assert reason_of(TRAJECTORY, value.replace(good, bad)) == "not_arrow"


@pytest.mark.parametrize("end", [8, 10, 1000, 2**31 - 1, -1])
def test_a_trajectorys_own_list_offsets_are_checked(end: int) -> None:
    """The last three places that read (0, 9) are the offsets of token_ids, loss_mask and logprobs."""
    value = TRAJECTORY.encode(TRAJECTORY_FULL)
    whole, patch = (np.array([0, n], np.int32).tobytes() for n in (9, end))
    at = len(value)
    for _ in range(3):
        at = value.rindex(whole, 0, at)
        patched = value[:at] + patch + value[at + 8 :]
        assert reason_of(TRAJECTORY, patched) == ("length_mismatch" if end == 8 else "not_arrow")


def test_a_null_inside_a_numeric_list_is_refused() -> None:
    codec, batch = batch_of("trajectory")
    i = batch.schema.get_field_index("token_ids")
    holed = pa.array([[1, None, 3]], pa.list_(pa.int32()))
    assert reason_of(codec, stream(batch.set_column(i, "token_ids", holed))) == "unexpected_null"


@pytest.mark.parametrize("column", ["version_spans", "turns", "stamps"])
def test_a_null_inside_a_list_of_structs_is_refused(column: str) -> None:
    codec, batch = batch_of("trajectory")
    i = batch.schema.get_field_index(column)
    for items in ([None], [dict.fromkeys(f.name for f in codec.schema.field(column).type.value_type)]):
        holed = pa.array([items], codec.schema.field(column).type)
        assert reason_of(codec, stream(batch.set_column(i, column, holed))) in ("unexpected_null", "stamps")


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("score", "ref"),
        ("sample", "ref"),
        ("weights", "samples"),
        ("weights", "consumed"),
        ("weights", "blobs"),
    ],
)
def test_a_null_inside_a_reference_is_refused(name: str, column: str) -> None:
    codec, batch = batch_of(name)
    i, kind = batch.schema.get_field_index(column), codec.schema.field(column).type
    item = dict.fromkeys(f.name for f in (kind.value_type if pa.types.is_list(kind) else kind))
    holed = pa.array([[item] if pa.types.is_list(kind) else item], kind)
    with pytest.raises(InvalidMessageError):
        codec.decode(stream(batch.set_column(i, column, holed)))


@pytest.mark.parametrize(
    ("name", "column", "word"),
    [
        ("trajectory", "status", "done"),
        ("trajectory", "split", "test"),
        ("score", "status", ""),
        ("sample", "fate", "x"),
        ("task", "split", "dev"),
        ("engine", "state", "ok"),
    ],
)
def test_a_word_outside_a_closed_set_is_refused(name: str, column: str, word: str) -> None:
    codec, batch = batch_of(name)
    i = batch.schema.get_field_index(column)
    with pytest.raises(InvalidMessageError, match="is none of"):
        codec.decode(stream(batch.set_column(i, batch.schema.field(i), pa.array([word]))))


def test_headers_carry_versions_and_undecodable_ones_do_not_crash() -> None:
    headers = version_headers("trajectory/1", "p", 3, 4)
    assert {k: header(headers, k) for k, _ in headers} == {
        "schema": "trajectory/1",
        "policy": "p",
        "version-min": "3",
        "version-max": "4",
    }
    assert header([("schema", b"\xff")], "schema") == "\ufffd"
    assert header([], "schema") is None


@settings(max_examples=800, deadline=None)
@given(which=st.integers(0, len(VALUES) - 1), mutate=mutations())
def test_mutated_bytes_are_a_bad_record_or_a_valid_one(which: int, mutate: Callable[[bytes], bytes]) -> None:
    codec, value = VALUES[which]
    try:
        record = codec.decode(mutate(value))
    except InvalidMessageError:
        return
    codec.check(record)
    assert plain(codec.decode(codec.encode(record))) == plain(record)


@settings(max_examples=300, deadline=None)
@given(which=st.integers(0, len(VALUES) - 1), value=st.binary(max_size=400))
def test_any_bytes_are_a_bad_record(which: int, value: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        VALUES[which][0].decode(value)
