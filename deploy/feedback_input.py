"""Outcome events from what a user typed or piped in, to the topic `feedback`."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from kafka.errors import KafkaError

from ..schemas.codec import SCHEMA_HEADER
from ..schemas.config import Config
from ..schemas.errors import BrokerError, ConfigError, InvalidMessageError
from ..schemas.feedback import FEEDBACK, Feedback, check_feedback
from ..schemas.topics import FEEDBACK as FEEDBACK_TOPIC
from ..schemas.topics import Topics
from ..streams.kafka import closing, create_topics, make_producer

KEYS = ("rollout", "name", "value", "event_time", "metadata", "id")
FLUSH_SECONDS = 60.0


def feedback_of(row: Mapping[str, Any], *, where: str) -> Feedback:
    """The event that `row` describes, by KEYS; `where` it stands is part of a ConfigError."""
    unknown = sorted(set(row) - set(KEYS))
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
    rollout, value, metadata = row.get("rollout"), row.get("value"), row.get("metadata")
    if not isinstance(rollout, str) or not rollout:
        raise ConfigError(f"{where}: rollout is {rollout!r}: give the rollout_id")
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, int | float):
        raise ConfigError(f"{where}: value is {value!r}: give a number")
    found = Feedback(
        feedback_id=str(row.get("id") or uuid.uuid4()),
        rollout_id=rollout,
        name=str(row.get("name") or "reward"),
        value=float(value),
        event_ms=event_ms(row.get("event_time"), where=where),
        metadata=metadata if metadata is None or isinstance(metadata, str) else json.dumps(metadata),
    )
    try:
        check_feedback(found)
    except InvalidMessageError as e:
        raise ConfigError(f"{where}: {e}") from None
    return found


def event_ms(value: Any, *, where: str) -> int:
    """Unix milliseconds from such, or from ISO 8601 with a zone; now for None. Raises ConfigError."""
    if value is None:
        return int(time.time() * 1000)
    text = str(value)
    if text.isascii() and text.isdigit() and len(text) <= 15:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise ConfigError(
            f"{where}: event time {text!r}: write Unix milliseconds, or 2026-01-31T12:00:00+00:00 with its zone"
        )
    return int(at.timestamp() * 1000)


def read_lines(path: Path) -> list[Feedback]:
    """The events in a JSON Lines file; `-` is standard input. Raises ConfigError with the line's number."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{name} cannot be read: {e}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as e:
            raise ConfigError(f"{where}: not JSON: {e}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: write a JSON object with {', '.join(KEYS)}")
        found.append(feedback_of(row, where=where))
    if not found:
        raise ConfigError(f"{name} holds no outcome")
    return found


def send_all(config: Config, events: list[Feedback]) -> None:
    """Send `events`, keyed by rollout_id; returns when all are delivered. Raises BrokerError."""
    topics = Topics(config.run.namespace)
    create_topics(config.kafka, topics, [config.policy.id])
    with closing(make_producer(config.kafka, client_id="headrace-feedback")) as producer:
        try:
            sent = [
                producer.send(
                    topics.name(FEEDBACK_TOPIC),
                    key=f.rollout_id.encode(),
                    value=FEEDBACK.encode(f),
                    headers=[(SCHEMA_HEADER, FEEDBACK.tag.encode())],
                )
                for f in events
            ]
            producer.flush(FLUSH_SECONDS)
            for future in sent:
                future.get(1)
        except KafkaError as e:
            raise BrokerError(f"not all outcomes were delivered, send them again with their ids: {e}") from e
