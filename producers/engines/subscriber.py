"""The weights topic -> the engine: stage (fetch, decode, check), pause, apply, verify, resume.

All that can fail happens before the pause, on the subscriber's own copy of the bits (replica.py); what fails
there leaves the engine as it was, serving. What fails after the first write poisons it: it then serves nothing
until an anchor is loaded. An update that changes no bit needs no pause, and one that comes while an operator
holds the engine takes none: it is applied, and tokens flow when the operator says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ...schemas.engine import EngineState, EngineStatus
from ...schemas.errors import (
    BlobCorruptError,
    BlobError,
    BlobNotFoundError,
    EngineError,
    HeadraceError,
    WeightUpdateError,
)
from ...schemas.update import WeightUpdate
from ...schemas.weights import WeightBlob, WeightRecord
from ...streams.blobs import BlobRef, BlobStore
from ...streams.compacts import find_jumps
from .audit import Audit
from .follower import Follower, Route, Trouble
from .pauses import Pauses
from .protocol import Engine, ReadsBack, Stages
from .replica import Replica, unchanged
from .report import Publish, Report

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 300.0


class WeightSubscriber:
    """Keeps one engine on the newest version. Used by one thread; `status` may be read from others."""

    def __init__(
        self,
        engine: Engine,
        store: BlobStore,
        *,
        engine_id: str,
        policy_id: str,
        url: str | None = None,
        publish: Publish,
        follower: Follower | None = None,
        pauses: Pauses | None = None,
        audit_seconds: float = AUDIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`publish` is told of every change of state outside a pause. `wall`: Unix seconds.

        `pauses`: shared with whoever else may pause this engine. `audit_seconds`: between looks at all live weights
        of an engine that can be looked at while it serves.
        """
        self._engine, self._store, self._clock = engine, store, clock
        self._follower = follower if follower is not None else Follower()
        self._pauses = pauses if pauses is not None else Pauses(engine)
        self._replica = Replica()
        self._audit = Audit(engine, self._replica, self._follower, seconds=audit_seconds, clock=clock)
        self._report = Report(
            engine,
            self._follower,
            self._pauses,
            engine_id=engine_id,
            policy_id=policy_id,
            url=url,
            publish=publish,
            wall=wall,
        )

    @property
    def version(self) -> int:
        """Live version; -1 before the first."""
        return self._follower.version

    def look_back(self) -> str | None:
        """Why the topic should be read again from its beginning; None: it need not. Said once for each such reading."""
        why = self._follower.look_back()
        if why is not None:
            self._follower.looked_back()
        return why

    def status(self) -> EngineStatus:
        """As of now."""
        return self._report.status()

    def announce(self) -> None:
        """Publish the status, changed or not."""
        self._report.announce()

    def see(self, records: Iterable[WeightRecord]) -> None:
        """Records of the weights topic, in any order, repeated or not."""
        for record in records:
            wrong = self._follower.see(record)
            if wrong is not None:
                self._report.wrong(wrong)

    def look_for_compacted(self) -> None:
        """See whether somebody has put one delta in the place of many (`headrace weights compact`)."""
        try:
            self._follower.offer(find_jumps(self._store, self._follower.records))
        except BlobError as e:
            logger.warning("no compacted deltas are looked for: %s", e)

    def follow(self) -> bool:
        """Take one step towards the newest version; False when there is none to take now."""
        self._report.announce_hold()
        route = self._follower.next(self._clock())
        if route is None:
            stuck = self._follower.stuck()
            if stuck is not None:
                self._report.stuck(stuck)
            self._look()
            return False
        if not route.blobs(0):
            self._advance(Route(route.records[:1], from_anchor=False))
            return True
        staged = self._stage(route)
        if staged is not None:
            self._swap(*staged)
        return True

    def stop(self) -> None:
        """Say that this engine takes no more requests."""
        self._report.enter(EngineState.STOPPED)

    def _advance(self, route: Route) -> None:
        """A version whose bits are those that are live."""
        record = route.records[0]
        try:
            with self._pauses.unchanged() as held:
                if held:  # `advance` takes effect with the next step, and none comes
                    self._engine.apply(unchanged(record))
                else:
                    self._engine.advance(record.version)
        except HeadraceError as e:
            self._replica.begin()
            self._failed(route, e)
            return
        self._follower.live(record)
        self._report.applied(paused=False, pause_s=0.0, apply_s=None)

    def _stage(self, route: Route) -> tuple[Route, WeightUpdate] | None:
        """As much of `route` as can be had, fetched, decoded, checked and composed; the replica then holds it."""
        self._report.enter(EngineState.STAGING)
        began = self._clock()
        self._replica.begin()
        updates: list[WeightUpdate] = []
        for index, record in enumerate(route.records):
            kind = route.kind(index)
            try:
                updates.append(self._replica.stage(record, kind, self._fetch(route.blobs(index))))
            except (BlobError, WeightUpdateError) as e:
                self._follower.failed(record.version, kind, self._clock(), _trouble(e))
                self._report.refused(f"{kind} of version {record.version} refused: {e}")
                break
        if not updates:
            self._report.stage_s = self._clock() - began
            self._report.enter(EngineState.IDLE)
            return None
        part = Route(route.records[: len(updates)], route.from_anchor)
        update = self._replica.composed(updates)
        if isinstance(self._engine, Stages):
            try:
                self._engine.stage(update)
            except HeadraceError as e:
                self._failed(part, e)
                return None
        self._report.stage_s = self._clock() - began
        return part, update

    def _fetch(self, blobs: Iterable[WeightBlob]) -> list[bytes]:
        """Every shard's bytes."""
        return [self._store.get(BlobRef(b.uri, b.size, b.sha256)) for b in blobs]

    def _swap(self, route: Route, update: WeightUpdate) -> None:
        self._report.enter(EngineState.PAUSING)
        began = self._clock()
        try:
            with self._pauses.for_update() as stopped:
                apply_s = self._write(update)
                self._report.state = EngineState.RESUMING
        except HeadraceError as e:
            self._failed(route, e)
            return
        self._follower.live(route.records[-1])
        self._report.applied(paused=stopped, pause_s=self._clock() - began, apply_s=apply_s)

    def _write(self, update: WeightUpdate) -> float:
        """Inside the pause: seconds of the write. After its first one every failure poisons, before tokens can flow."""
        self._report.state = EngineState.APPLYING
        began = self._clock()
        try:
            self._engine.apply(update)
        except WeightUpdateError:
            raise  # refused before anything was written
        except Exception as e:
            self._poison()
            raise e if isinstance(e, HeadraceError) else EngineError(f"{type(e).__name__}: {e}") from e
        took = self._clock() - began
        self._report.state = EngineState.VERIFYING
        try:
            self._verify(update)
        except Exception as e:
            self._poison()
            raise e if isinstance(e, HeadraceError) else EngineError(f"{type(e).__name__}: {e}") from e
        return took

    def _verify(self, update: WeightUpdate) -> None:
        # The replica, with these patches, has the version's hash: what was live had the base's, so looking at what
        # was written proves the same as a hash of everything, and costs a pass over the patches alone.
        if isinstance(self._engine, ReadsBack):
            self._engine.verify(update)
            return
        live = self._engine.weights_hash()
        if live != update.weights_hash:
            raise WeightUpdateError("live_hash", f"{live}, expected {update.weights_hash}")

    def _look(self) -> None:
        wrong = self._audit.look()
        if wrong is not None:
            with self._pauses.for_update():
                self._poison()
            self._follower.torn()
            self._report.failed(f"version {self._follower.version} is live no longer: {wrong}")

    def _poison(self) -> None:
        self._engine.poison()
        self._report.poisoned = True

    def _failed(self, route: Route, error: HeadraceError) -> None:
        """The engine did not take it: it is torn and needs an anchor, or it is as it was and so must the replica be."""
        poisoned = self._report.poisoned
        reason = error.reason if isinstance(error, WeightUpdateError) else None
        # Of several composed versions any may be the one that does not fit: fewer are tried next.
        never = reason not in (None, "base_version") and len(route.records) == 1 and not poisoned
        newest = route.records[-1].version
        trouble = Trouble.BAD if never else Trouble.AWAY
        self._follower.failed(newest, route.kind(len(route.records) - 1), self._clock(), trouble)
        if poisoned or reason == "base_version" or not self._replica.undo():
            self._follower.torn()
        self._report.failed(f"version {newest} {'failed' if poisoned else 'refused'}: {error}")


def _trouble(error: BlobError | WeightUpdateError) -> Trouble:
    if isinstance(error, WeightUpdateError):
        return Trouble.BAD
    return Trouble.GONE if isinstance(error, BlobNotFoundError | BlobCorruptError) else Trouble.AWAY
