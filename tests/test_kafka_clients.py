"""What headrace's own Kafka helpers do when a node is lost while it is asked."""

from __future__ import annotations

from typing import Any

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaConnectionError, KafkaError, KafkaTimeoutError, TopicAuthorizationFailedError

from headrace.schemas.errors import BrokerError
from headrace.streams.kafka import Consumer, partitions_of


class Answers:
    """A consumer whose metadata requests end one after the other as given, the last one for ever."""

    def __init__(self, *answers: set[int] | KafkaError | None) -> None:
        self._answers = list(answers)
        self.asked = 0

    def partitions_for_topic(self, topic: str) -> Any:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, KafkaError):
            raise answer
        return answer


def test_a_node_lost_while_it_is_asked_for_partitions_is_asked_about_again() -> None:
    consumer = Answers(KafkaConnectionError("socket disconnected"), None, {1, 0})
    assert partitions_of(consumer, "a") == [TopicPartition("a", 0), TopicPartition("a", 1)]
    assert consumer.asked == 3


def test_what_no_other_node_can_mend_is_raised_at_once() -> None:
    consumer = Answers(TopicAuthorizationFailedError())
    with pytest.raises(TopicAuthorizationFailedError):
        partitions_of(consumer, "a")
    assert consumer.asked == 1


def test_no_node_for_too_long_and_a_topic_that_is_missing_are_told_apart() -> None:
    with pytest.raises(KafkaConnectionError):
        partitions_of(Answers(KafkaConnectionError("refused")), "a", timeout_s=0.0)
    with pytest.raises(BrokerError, match="topic a does not exist"):
        partitions_of(Answers(None), "a", timeout_s=0.0)


@pytest.mark.parametrize("name", ["beginning_offsets", "end_offsets"])
def test_offsets_are_asked_for_again_while_a_leader_is_unknown(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, late = TopicPartition("a", 0), TopicPartition("b", 0)
    known = [here]

    def ask(self: Any, partitions: list[TopicPartition], timeout_ms: int | None = None) -> Any:
        found = {tp: 7 for tp in known}
        known[1:] = [late] if timeout_ms is None else []
        return {tp: found[tp] for tp in partitions}

    monkeypatch.setattr(KafkaConsumer, name, ask)
    consumer = object.__new__(Consumer)
    assert getattr(consumer, name)([here, late]) == {here: 7, late: 7}
    known.remove(late)
    with pytest.raises(KafkaTimeoutError, match="no leader"):
        getattr(consumer, name)([here, late], timeout_ms=20)


def test_a_topic_is_asked_about_again_where_a_node_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(KafkaConnectionError("111 ECONNREFUSED"), {0, 1})
    monkeypatch.setattr(
        KafkaConsumer, "partitions_for_topic", lambda self, topic: answers.partitions_for_topic(topic)
    )
    assert object.__new__(Consumer).partitions_for_topic("a") == {0, 1}
