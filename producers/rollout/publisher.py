"""Trajectories -> Kafka. A rollout counts as done when its record is acknowledged, not before.

What cannot be delivered is sent again until it is; admission counts it as running meanwhile, so no more than
one worker's rollouts ever wait here. Acknowledgements come from the producer's thread in bursts; the event
loop is woken once for each burst.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from kafka import KafkaProducer
from kafka.errors import KafkaError, MessageSizeTooLargeError

from ...schemas.codec import Headers, version_headers
from ...schemas.deadletter import DeadLetter, dead_letter_headers
from ...schemas.errors import BlobError, InvalidMessageError
from ...schemas.trajectory import TRAJECTORY, Trajectory, TrajectoryStatus
from ...streams import metrics
from ...streams.blobs import BlobStore
from ...streams.claims import check_in

logger = logging.getLogger(__name__)

RESEND_SECONDS = 1.0
LEDGER_VARIABLE = "HEADRACE_ACK_LEDGER"
"""Names a file to which the id of each acknowledged trajectory is appended, a line each: a second set of books, with
which `headrace audit` proves that Kafka kept what it had acknowledged."""


@dataclasses.dataclass(slots=True)
class Outgoing:
    """One trajectory on its way."""

    trajectory: Trajectory
    value: bytes
    headers: Headers
    sent_ms: int = 0
    acked_ms: int = 0
    """Own clock, when the acknowledgement came."""
    append_ms: int = 0
    """The broker's clock."""
    error: KafkaError | None = None


class Publisher:
    """Sends on one event loop; `done(outgoing)` is called there for each acknowledged record."""

    def __init__(
        self,
        producer: KafkaProducer,
        topic: str,
        *,
        store: BlobStore,
        inline_max: int,
        done: Callable[[Outgoing], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._producer, self._topic = producer, topic
        self._store, self._inline_max = store, inline_max
        self._done, self._now_ms = done, now_ms
        self._loop = asyncio.get_running_loop()
        self._settled: deque[Outgoing] = deque()
        self._waking = False
        self._progress = asyncio.Event()
        self.unsettled = 0
        """Records handed over and not acknowledged."""
        path = os.environ.get(LEDGER_VARIABLE)
        self._ledger = open(path, "a", buffering=1) if path else None  # noqa: SIM115

    async def publish(self, trajectory: Trajectory) -> None:
        """Hand over one trajectory; large ones go to the blob store first."""
        out = _encoded(trajectory)
        if len(out.value) > self._inline_max:
            out = await self._claimed(out)
        self.unsettled += 1
        self._send(out)

    async def flush(self, seconds: float) -> int:
        """Wait for acknowledgements; how many are still missing after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self.unsettled:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            logger.error("trajectories not acknowledged count=%d", self.unsettled)
        return self.unsettled

    async def _claimed(self, out: Outgoing) -> Outgoing:
        t = out.trajectory
        name = f"trajectories/{t.policy_id}/{t.trajectory_id}.arrow"
        try:
            value, headers = await asyncio.to_thread(
                check_in, out.value, out.headers, name=name, store=self._store, inline_max=self._inline_max
            )
        except BlobError:
            logger.exception("a large trajectory cannot be stored rollout=%s", t.rollout_id)
            return _encoded(aborted_marker(t, "blob_store"))
        return Outgoing(t, value, headers)

    def _send(self, out: Outgoing) -> None:
        out.sent_ms = self._now_ms()
        future = self._producer.send(
            self._topic, value=out.value, key=out.trajectory.rollout_id.encode(), headers=out.headers
        )

        def acknowledged(metadata: Any) -> None:
            out.append_ms = metadata.timestamp
            self._settle(out)

        def failed(error: KafkaError) -> None:
            out.error = error
            self._settle(out)

        future.add_callback(acknowledged)
        future.add_errback(failed)

    def _settle(self, out: Outgoing) -> None:
        """On the producer's thread."""
        out.acked_ms = self._now_ms()
        self._settled.append(out)
        if not self._waking:
            self._waking = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        self._waking = False
        while self._settled:
            out = self._settled.popleft()
            if out.error is None:
                self.unsettled -= 1
                self._progress.set()
                if self._ledger is not None:
                    self._ledger.write(f"{out.trajectory.trajectory_id}\n")
                self._done(out)
            elif isinstance(out.error, MessageSizeTooLargeError):
                logger.error("store.inline_max_bytes is above what the topic takes: %s", out.error)
                self._send(_encoded(aborted_marker(out.trajectory, "too_large")))
            else:
                logger.warning("trajectory not delivered, again rollout=%s", out.trajectory.rollout_id)
                out.error = None
                self._loop.call_later(RESEND_SECONDS, self._send, out)


def aborted_marker(t: Trajectory, reason: str) -> Trajectory:
    """The terminal marker of a rollout whose tokens cannot be recorded."""
    return dataclasses.replace(
        t,
        status=TrajectoryStatus.ABORTED,
        reason=reason,
        token_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, bool),
        logprobs=np.empty(0, np.float32),
        version_spans=(),
        turns=(),
        stop_reason="abort",
        messages=None,
        metadata=None,
    )


def refuse(
    producer: KafkaProducer, topic: str, record: Any, error: InvalidMessageError, *, now_ms: int
) -> None:
    """Send a record that this stage cannot use to the dead letters, as it came."""
    letter = DeadLetter(
        stage="rollout",
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=error.reason,
        detail=error.detail,
        at_ms=now_ms,
    )
    metrics.dead_letters.labels(stage="rollout").inc()
    producer.send(
        topic, key=record.key, value=record.value, headers=dead_letter_headers(record.headers, letter)
    )


def _encoded(t: Trajectory) -> Outgoing:
    try:
        value = TRAJECTORY.encode(t)
    except InvalidMessageError as e:
        logger.error("a trajectory breaks its own rules rollout=%s: %s", t.rollout_id, e)
        t = aborted_marker(t, f"invalid_{e.reason}")
        value = TRAJECTORY.encode(t)
    headers = version_headers(TRAJECTORY.tag, t.policy_id, t.version_min, t.version_max)
    return Outgoing(t, value, headers)
