"""The start of the trainer's transactions while brokers are away."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.errors import KafkaTimeoutError, TransactionalIdAuthorizationFailedError

from headrace.consumers.trainer import publish
from headrace.schemas.config import KafkaConfig
from headrace.schemas.errors import BrokerError
from headrace.schemas.topics import Topics


class Producer:
    """Raises what it is told to, one after the other, and then starts."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors, self.closed = errors, 0

    def init_transactions(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def close(self, timeout: float) -> None:
        self.closed += 1


def start(monkeypatch: pytest.MonkeyPatch, producer: Producer, clock: Any) -> Any:
    monkeypatch.setattr(publish, "make_producer", lambda *_, **__: producer)
    return publish.make_transactional(
        KafkaConfig(), Topics("t"), "policy", patience_s=100, clock=clock, pause=lambda _: None
    )


def test_it_is_tried_again_while_brokers_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer([KafkaTimeoutError("away"), KafkaTimeoutError("away")])
    assert start(monkeypatch, producer, iter(range(0, 100, 10)).__next__) is producer
    assert producer.closed == 2


def test_it_is_given_up_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer([KafkaTimeoutError("away")] * 9)
    with pytest.raises(BrokerError, match="cannot start"):
        start(monkeypatch, producer, iter([0, 50, 101]).__next__)
    assert producer.closed == 2


def test_what_time_does_not_mend_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer([TransactionalIdAuthorizationFailedError("no")])
    with pytest.raises(BrokerError, match="cannot start"):
        start(monkeypatch, producer, iter([0]).__next__)
