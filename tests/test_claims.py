"""Large records by reference: small ones stay as they are, and a claim that lies is a bad record, not a crash."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.errors import BlobError, InvalidMessageError
from headrace.streams.blobs import BlobRef, BlobStore, memory_store
from headrace.streams.claims import CLAIM_HEADER, MAX_CLAIM_BYTES, check_in, check_out

HEADERS = [("schema", b"trajectory/1"), ("traceparent", b"00-x")]


@pytest.fixture(scope="module")
def store() -> BlobStore:
    return memory_store()


def test_a_small_record_stays_inline(store: BlobStore) -> None:
    value, headers = check_in(b"x" * 10, HEADERS, name="a", store=store, inline_max=10)
    assert (value, headers) == (b"x" * 10, HEADERS)
    assert check_out(value, headers, store=store) == value


def test_a_large_record_is_claimed_and_its_headers_stay(store: BlobStore) -> None:
    value, headers = check_in(b"x" * 11, HEADERS, name="big", store=store, inline_max=10)
    assert headers == [*HEADERS, (CLAIM_HEADER, b"1")]
    assert json.loads(value)["size"] == 11
    assert check_out(value, headers, store=store) == b"x" * 11


def test_a_record_without_a_claim_is_handed_through_even_when_it_looks_like_one(store: BlobStore) -> None:
    value = b'{"blob": "a", "size": 1, "sha256": "0"}'
    assert check_out(value, HEADERS, store=store) == value
    assert check_out(None, [], store=store) is None


CLAIM = [(CLAIM_HEADER, b"1")]


def forged(**fields: object) -> bytes:
    return json.dumps({"blob": "big", "size": 11, "sha256": "0" * 64} | fields).encode()


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b"{" * 5000,
        b"[" * 100_000,
        forged(size="many"),
        forged(size=None),
        forged(size=1e400),
        forged(size=-1),
        forged(sha256="0" * 64),
        forged(blob="../../etc/passwd"),
        forged(blob="/etc/passwd"),
        forged(blob=""),
        forged(blob="missing"),
        forged(blob={"a": 1}),
    ],
)
def test_a_claim_that_cannot_be_honoured_is_a_bad_record(store: BlobStore, value: bytes | None) -> None:
    store.put("big", b"y" * 11)
    with pytest.raises(InvalidMessageError) as error:
        check_out(value, CLAIM, store=store)
    assert error.value.reason == "claim"


def test_a_claim_on_more_than_a_reader_takes_is_refused_before_it_is_read(store: BlobStore) -> None:
    with pytest.raises(InvalidMessageError) as error:
        check_out(forged(size=MAX_CLAIM_BYTES + 1), CLAIM, store=store)
    assert error.value.reason == "too_large"


def test_a_store_that_does_not_answer_is_no_fault_of_the_record(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(self: BlobStore, ref: BlobRef) -> bytes:
        raise BlobError("the store does not answer")

    monkeypatch.setattr(BlobStore, "get", down)
    with pytest.raises(BlobError):
        check_out(forged(), CLAIM, store=store)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text() | st.floats(), st.lists).map(
        lambda v: json.dumps({"blob": v, "size": v, "sha256": v}).encode()
    )
)
def test_any_claim_is_a_bad_record_or_nothing(value: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        check_out(value, CLAIM, store=memory_store())
