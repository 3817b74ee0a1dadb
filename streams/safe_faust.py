"""Faust without its losses: a consumer that hands out every record, in order, or none of what follows it.

Faust 0.15 loses records where three things meet: it lets records through while it still seeks, it takes a
jump in offsets for a hole in the topic, and it commits past what it has not seen. Here one offset per
partition is due next (the gate); nothing above it passes before it, no jump is explained away, nothing is
committed before the start of a partition is known, and a head that got lost is read again.

Faust's own account of it: faust#216 (mended for apps without tables only), #378, #596, #606. What it cannot do
even so: a recovery of tables may wait for ever (#176, #155, #651), which the watchdog ends; exactly_once repeats
records under read_committed, so we do without it. Real holes (compaction, transactions) are told from lost
records by asking the broker afresh: holes.py. That is slow, meant for the foreign writer and not for each record.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import faust
from aiokafka.errors import IllegalStateError
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.transport.drivers.aiokafka import Consumer
from faust.types import TP
from kafka.errors import KafkaError

from ..schemas.errors import BrokerError
from . import metrics
from .holes import Hole, HoleBook, Look
from .paced_fetch import PacedConsumerThread

logger = logging.getLogger(__name__)

YIELD_EVERY = 50
"""Messages handed over between two turns of the event loop."""
HEAD_MISSING_SECONDS = 2.0
MAX_HEAD_MISSING_SECONDS = 8.0
"""A head that stays away is asked for again at growing distance, so that a full queue can drain."""
MAX_LOOK_SECONDS = 30.0
"""Nothing readable before the end, at growing distance: an open transaction of somebody else may take long."""


def install(app: faust.App, look: Look | None = None) -> None:
    """Make `app` use the safe consumer; before it starts. Its TableManager is set when the app is made.

    `look` asks the broker for holes (holes.look_with); without it the topics must not have any.
    """
    app.transport.Consumer = functools.partial(SafeConsumer, look=look)


class SafeRecovery(Recovery):
    """Stops the flow before partitions are resumed, so that nothing is delivered until the seek is done."""

    async def on_recovery_completed(self, generation_id: int = 0) -> None:
        """With tables."""
        self.app.consumer.stop_flow()
        await super().on_recovery_completed(generation_id)

    async def _resume_streams(self, generation_id: int = 0) -> None:
        """Without tables."""
        self.app.consumer.stop_flow()
        await super()._resume_streams(generation_id)


class SafeTableManager(TableManager):
    """Builds the safe recovery."""

    _recovery: Recovery | None = None

    @property
    def recovery(self) -> Recovery:
        """The recovery service, made on first use."""
        if self._recovery is None:
            self._recovery = SafeRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery


@dataclass(slots=True)
class _Missing:
    """A committed offset that no message stands for."""

    offset: int
    since: float
    patience: float = HEAD_MISSING_SECONDS


class SafeConsumer(Consumer):
    """Whole and in order, or not at all."""

    def __init__(self, *args: Any, look: Look | None = None, **kwargs: Any) -> None:
        self._look = look
        self._holes: dict[TP, HoleBook] = {}
        self._idle: dict[TP, _Missing] = {}
        """Partitions with nothing to read before their end."""
        self._due: dict[TP, int] = {}
        """Per input partition the one offset that may be delivered next."""
        self._missing: dict[TP, _Missing] = {}
        super().__init__(*args, **kwargs)

    def delivered(self) -> dict[TP, int | None]:
        """Per assigned input partition the offset that is due next; None while it is unknown. Any thread."""
        return {tp: self._due.get(tp) for tp in self._inputs(self.assignment())}

    def committed(self) -> dict[TP, int | None]:
        """Per assigned input partition the committed offset, as this process knows it. Any thread."""
        return {tp: self._committed_offset.get(tp) for tp in self._inputs(self.assignment())}

    def past_holes(self, tp: TP, offset: int) -> int:
        """`offset`, or the end of the known hole that it lies in. Any thread."""
        book = self._holes.get(tp)
        return offset if book is None else book.past(offset)

    async def getmany(self, timeout: float) -> AsyncIterator[tuple[TP, Any]]:  # noqa: ASYNC109
        """Messages in the order of their offsets: what comes early is sought back to, what comes again is skipped."""
        sought: set[TP] = set()
        async for tp, message in super().getmany(timeout):
            if self._is_changelog_tp(tp):
                yield tp, message
                continue
            due = self._due.get(tp)
            if due is None or message.offset < due or tp in sought:
                continue
            if message.offset > due:
                past = await self._passed(tp, due, message.offset)
                if past != message.offset:
                    sought.add(tp)
                    if past is not None:
                        logger.info("a jump in %s: due=%d came=%d", tp, past, message.offset)
                        await self._seek_if_assigned(tp, past)
                    continue
            self._due[tp] = message.offset + 1
            yield tp, message

    async def _drain_messages(self, fetcher: Any) -> None:
        """Faust's loop from the broker to the streams' queues, without the four futures it makes per message."""
        try:
            count = 0
            while not (self.should_stop or fetcher.should_stop):
                async for tp, message in self.getmany(timeout=1.0):
                    if self._would_block(tp):
                        await self.wait_first(self.callback(message), self.suspend_flow.wait())
                    else:
                        await self.callback(message)
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0)
        except (*self.consumer_stopped_errors, asyncio.CancelledError):
            if not self.transport.app.should_stop:
                raise

    def _would_block(self, tp: TP) -> bool:
        """Handing over a message would wait: it must be given up when the flow stops meanwhile."""
        return not self.app.flow_control.is_active() or self._is_full(tp)

    def _is_full(self, tp: TP) -> bool:
        return any(c.queue.full() for c in self.app.topics._tp_index.get(tp, ()))

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        """Nothing is due any more."""
        self._forget(revoked)
        await super().on_partitions_revoked(revoked)

    async def seek(self, partition: TP, offset: int) -> None:
        """Read `partition` from `offset` on."""
        self._due.pop(partition, None)
        await self.seek_wait({partition: offset})
        self._due[partition] = offset

    async def perform_seek(self) -> None:
        """Read every input partition from its committed offset on, or from its earliest record."""
        self._forget(list(self._due))
        await super().perform_seek()
        await self._settle(self._inputs(self.assignment()))

    async def force_commit(self, topics: Any = None, start_new_transaction: bool = True) -> bool:
        """Commit, then read again what has been missing for too long."""
        did_commit = await super().force_commit(topics, start_new_transaction=start_new_transaction)
        if self.flow_active and not self.app.rebalancing and not self.should_stop:
            for tp in self._long_missing(time.monotonic()):
                await self._reread(tp)
            if self._look is not None:
                await self._pass_holes(self._long_idle(time.monotonic()))
        for tp, book in self._holes.items():
            book.forget_below(self._committed_offset.get(tp) or 0)
        return did_commit

    async def _add_gap(self, tp: TP, offset_from: int, offset_to: int) -> None:
        """A jump is no proof of a hole: the broker is asked instead."""

    def _new_offset(self, tp: TP) -> int | None:
        """What may be committed: only what follows the committed offset without a cut."""
        committed, acked = self._committed_offset.get(tp), self._acked.get(tp)
        if committed is None:
            return None
        past = self.past_holes(tp, committed)
        if past > committed:
            return past
        if not acked or min(acked) > committed:
            return None
        new = super()._new_offset(tp)
        return None if new is None else self.past_holes(tp, new)

    async def _pass_holes(self, tps: list[TP]) -> None:
        for tp in tps:
            due = self._due.get(tp)
            if due is not None:  # a rebalance while the broker was asked about another may have taken it away
                await self._passed(tp, due, None)

    async def _passed(self, tp: TP, due: int, came: int | None) -> int | None:
        """The offset after the holes that `due` lies before, once it is due; None when the partition went away.

        `came`: the offset in hand, which may be known to come next; None when nothing came.
        """
        past = self.past_holes(tp, due)
        if past == due and self._look is not None:
            holes = await self._ask(tp, due)
            if self._due.get(tp) != due:
                return None
            if holes:
                self._acked[tp]  # makes Faust ask for what may be committed
                self._holes.setdefault(tp, HoleBook()).add(holes)
                past = self.past_holes(tp, due)
        if past > due:
            if came is None or past > came:
                logger.info("%s: nothing to read from %d to %d", tp, due, past - 1)
            metrics.offsets_without_record.inc(past - due)
            self._due[tp] = past
        return past

    async def _ask(self, tp: TP, offset: int) -> list[Hole]:
        assert self._look is not None
        try:
            return await asyncio.to_thread(self._look, tp.topic, tp.partition, offset)
        except (BrokerError, KafkaError) as e:
            logger.warning("%s: no answer what follows offset %d: %s", tp, offset, e)
            return []

    def _long_idle(self, now: float) -> list[TP]:
        """Partitions that say there is more, and give nothing."""
        found = []
        for tp in self._inputs(self.assignment()):
            due = self._due.get(tp)
            known = self._idle.get(tp)
            if due is None or due >= (self.highwater(tp) or 0) or self._is_full(tp):
                self._idle.pop(tp, None)
            elif known is None or known.offset != due:
                self._idle[tp] = _Missing(due, now)
            elif now - known.since >= known.patience:
                known.since, known.patience = now, min(2 * known.patience, MAX_LOOK_SECONDS)
                found.append(tp)
        return found

    def _new_consumer_thread(self) -> PacedConsumerThread:
        return PacedConsumerThread(self, loop=self.loop, beacon=self.beacon)

    def _inputs(self, tps: Iterable[TP]) -> list[TP]:
        return [tp for tp in tps if not self._is_changelog_tp(tp)]

    def _forget(self, tps: Iterable[TP]) -> None:
        for tp in tps:
            self._due.pop(tp, None)
            self._missing.pop(tp, None)
            self._idle.pop(tp, None)
            self._holes.pop(tp, None)

    async def _seek_if_assigned(self, tp: TP, offset: int) -> None:
        try:
            await self.seek(tp, offset)
        except IllegalStateError:
            logger.info("%s was taken away during a seek", tp)

    async def _settle(self, tps: list[TP]) -> None:
        """Give every partition a start: the committed offset, moved into the range that the broker has."""
        if not tps:
            return
        earliest, ends = await self.earliest_offsets(*tps), await self.highwaters(*tps)
        for tp in tps:
            committed = self._committed_offset.get(tp)
            start = self._start_of(tp, committed, earliest.get(tp), ends.get(tp))
            if start is None:
                continue
            if start != committed:
                await self.seek(tp, start)
                self._committed_offset[tp] = start
            self._due[tp] = start

    def _start_of(self, tp: TP, committed: int | None, earliest: int | None, end: int | None) -> int | None:
        if committed is None or earliest is None or end is None:
            return committed if committed is not None else earliest
        if committed < earliest:
            logger.warning("%s: records %d to %d expired unread", tp, committed, earliest - 1)
            metrics.records_expired.inc(earliest - committed)
        elif committed > end:
            logger.warning(
                "%s: committed=%d is beyond the end=%d; the broker lost records", tp, committed, end
            )
        return min(max(committed, earliest), max(end, earliest))

    def _long_missing(self, now: float) -> list[TP]:
        """Partitions whose head has had no message for too long, or that have no start."""
        found = []
        for tp in self._inputs(self.assignment()):
            head = self._missing_head(tp)
            known = self._missing.get(tp)
            if head is None:
                self._missing.pop(tp, None)
            elif known is None or known.offset != head:
                self._missing[tp] = _Missing(head, now)
            elif now - known.since >= known.patience:
                known.since, known.patience = now, min(2 * known.patience, MAX_HEAD_MISSING_SECONDS)
                found.append(tp)
        return found

    def _missing_head(self, tp: TP) -> int | None:
        """The committed offset when later ones are done and no message of it is at work; -1 without a start."""
        committed, acked = self._committed_offset.get(tp), self._acked.get(tp)
        if committed is None or tp not in self._due:
            return -1
        if not acked or min(acked) <= committed or self.past_holes(tp, committed) > committed:
            return None
        at_work = any(m.tp == tp and m.offset == committed for m in list(self._unacked_messages))
        return None if at_work else committed

    async def _reread(self, tp: TP) -> None:
        metrics.rereads.inc()
        committed = self._committed_offset.get(tp)
        logger.warning("%s: offset %s is missing, reading again", tp, committed)
        try:
            if committed is None:
                await self.perform_seek()
                return
            await self.seek(tp, committed)
            await self._settle([tp])
        except IllegalStateError:
            logger.info("%s was taken away during a seek", tp)
