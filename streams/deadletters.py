"""Records that a stage could not use: the original bytes go to `deadletters`, and the partition goes on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from ..schemas.codec import Headers
from ..schemas.deadletter import DeadLetter, dead_letter_record
from ..schemas.errors import InvalidMessageError
from ..schemas.topics import DEADLETTERS, Topics
from . import metrics
from .outbox import Outbox

logger = logging.getLogger(__name__)


def letter_of(message: Any, error: InvalidMessageError, *, stage: str, at_ms: int) -> DeadLetter:
    """Where `message` (anything with topic, partition and offset) came from and why it cannot be used."""
    return DeadLetter(
        stage=stage,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        reason=error.reason,
        detail=error.detail,
        at_ms=at_ms,
    )


class DeadLetters:
    """Sends the dead letters of one stage."""

    def __init__(self, outbox: Outbox, topics: Topics, stage: str) -> None:
        self._outbox, self._topic, self._stage = outbox, topics.name(DEADLETTERS), stage

    async def send(self, message: Any, error: InvalidMessageError) -> asyncio.Future[Any]:
        """Send the record in `message`, key, value and headers as they came; the future is its delivery."""
        letter = letter_of(message, error, stage=self._stage, at_ms=int(time.time() * 1000))
        metrics.dead_letters.labels(stage=self._stage).inc()
        logger.warning(
            "dead letter: stage=%s topic=%s partition=%d offset=%d reason=%s detail=%s",
            self._stage,
            letter.topic,
            letter.partition,
            letter.offset,
            letter.reason,
            letter.detail[:200],
        )
        record = dead_letter_record(message.key, message.value, headers_of(message), letter)
        return await self._outbox.send(self._topic, *record)


def headers_of(message: Any) -> Headers:
    """The record headers of a Faust message, as pairs, whatever their bytes."""
    headers: Sequence[tuple[str, bytes]] | dict[str, bytes] | None = message.headers
    if not headers:
        return []
    return list(headers.items()) if isinstance(headers, dict) else list(headers)
