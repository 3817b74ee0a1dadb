"""A limit on calls that have none."""

from __future__ import annotations

import threading

import pytest
from kafka.errors import KafkaTimeoutError

from headrace.streams.bounded import bounded


def test_a_result_and_an_error_pass_through() -> None:
    assert bounded(lambda: 7, limit_s=30, what="it") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, limit_s=30, what="it")


def test_a_call_that_never_returns_is_given_up() -> None:
    never = threading.Event()
    with pytest.raises(KafkaTimeoutError, match="the transaction was not done"):
        bounded(never.wait, limit_s=0.01, what="the transaction")
    never.set()
