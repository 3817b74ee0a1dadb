"""The weights topic -> the engine: stage (fetch, decode, check), pause, apply, verify, resume.

All that can fail happens before the pause, on the subscriber's own copy of the bits (2 bytes a parameter);
what fails there leaves the engine as it was, serving. What fails after the first write poisons it: it then
serves nothing until an anchor is loaded. An update that changes no bit needs no pause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...schemas.delta import decode_anchor, decode_delta
from ...schemas.engine import EngineState, EngineStatus
from ...schemas.errors import BlobError, EngineError, HeadraceError, WeightUpdateError
from ...schemas.update import WeightUpdate, apply_update, weights_of
from ...schemas.weights import BlobKind, WeightRecord
from ...streams import metrics
from ...streams.blobs import BlobRef, BlobStore
from .follower import Follower, Route
from .protocol import Engine

logger = logging.getLogger(__name__)

Publish = Callable[[EngineStatus], None]


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
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`publish` is told of every change of state outside a pause. `wall`: Unix seconds."""
        self._engine, self._store = engine, store
        self._engine_id, self._policy_id, self._url = engine_id, policy_id, url
        self._publish, self._clock, self._wall = publish, clock, wall
        self._follower = follower if follower is not None else Follower()
        self._bits: dict[str, np.ndarray] = {}
        self._hashes: dict[str, int] = {}
        self._state = EngineState.IDLE
        self._poisoned = False
        self._updates = 0
        self._stage_ms: float | None = None
        self._apply_ms: float | None = None
        self._pause_ms: float | None = None
        self._reason: str | None = None

    @property
    def version(self) -> int:
        """Live version; -1 before the first."""
        return self._follower.version

    def status(self) -> EngineStatus:
        """As of now."""
        return EngineStatus(
            engine_id=self._engine_id,
            policy_id=self._policy_id,
            state=self._state,
            version=self._follower.version,
            weights_hash=None if self._poisoned else self._follower.weights_hash,
            latest_version=self._follower.latest,
            updates=self._updates,
            pause_ms=self._pause_ms,
            apply_ms=self._apply_ms,
            stage_ms=self._stage_ms,
            running=self._engine.running,
            generated_tokens=self._engine.generated_tokens,
            url=self._url,
            reason=self._reason,
            at_ms=int(self._wall() * 1000),
        )

    def announce(self) -> None:
        """Publish the status, changed or not."""
        metrics.engine_running.set(self._engine.running)
        self._publish(self.status())

    def see(self, records: Iterable[WeightRecord]) -> None:
        """Records of the weights topic, in their order."""
        for record in records:
            self._follower.see(record)

    def follow(self) -> bool:
        """Take one step towards the newest version; False when there is none to take now."""
        route = self._follower.next(self._clock())
        if route is None:
            stuck = self._follower.stuck()
            if stuck is not None and not (self._reason or "").endswith(stuck):
                self._reason = stuck if self._reason is None else f"{self._reason}; {stuck}"
                logger.warning("%s", stuck)
                self.announce()
            return False
        if not route.from_anchor and route.records[0].weights_hash == self._follower.weights_hash:
            self._advance(route.records[0])
            return True
        staged = self._stage(route)
        if staged:
            self._swap(route, staged)
        return True

    def stop(self) -> None:
        """Say that this engine takes no more requests."""
        self._enter(EngineState.STOPPED)

    def _advance(self, record: WeightRecord) -> None:
        self._engine.advance(record.version)
        self._follower.live(record)
        metrics.engine_version.set(record.version)
        self.announce()

    def _stage(self, route: Route) -> list[WeightUpdate]:
        """Decoded and checked updates for the first records of `route`; the copy of the bits then holds them."""
        self._enter(EngineState.STAGING)
        began = self._clock()
        staged: list[WeightUpdate] = []
        for index, record in enumerate(route.records):
            kind = route.kind(index)
            try:
                staged.append(self._decode(record, kind))
            except (BlobError, WeightUpdateError) as e:
                final = isinstance(e, WeightUpdateError)
                self._follower.failed(record.version, kind, self._clock(), final=final)
                self._refused(f"{kind} of version {record.version} refused: {e}")
                break
        self._stage_ms = _ms(self._clock() - began)
        if not staged:
            self._enter(EngineState.IDLE)
        return staged

    def _decode(self, record: WeightRecord, kind: BlobKind) -> WeightUpdate:
        if kind is BlobKind.ANCHOR:
            shapes = {name: bits.shape for name, bits in self._bits.items()} or None
            update = decode_anchor(
                self._fetch(record, kind),
                version=record.version,
                weights_hash=record.weights_hash,
                shapes=shapes,
            )
            self._bits, self._hashes = weights_of(update), dict(update.hashes)
            return update
        assert record.base_version is not None
        update = decode_delta(
            self._fetch(record, kind),
            self._bits,
            base_version=record.base_version,
            version=record.version,
            base_hashes=self._hashes,
            weights_hash=record.weights_hash,
        )
        apply_update(self._bits, update)
        self._hashes.update(update.hashes)
        return update

    def _fetch(self, record: WeightRecord, kind: BlobKind) -> bytes:
        blobs = record.blobs_of(kind)
        if len(blobs) != 1:
            raise WeightUpdateError("shards", f"{len(blobs)} shards; this engine reads one")
        return self._store.get(BlobRef(blobs[0].uri, blobs[0].size, blobs[0].sha256))

    def _swap(self, route: Route, staged: Sequence[WeightUpdate]) -> None:
        records = route.records[: len(staged)]
        self._enter(EngineState.PAUSING)
        began = self._clock()
        try:
            with self._engine.paused():
                self._write(staged)
                self._state = EngineState.RESUMING
        except HeadraceError as e:
            self._pause_ms = _ms(self._clock() - began)
            self._failed(route, records, e)
            return
        self._pause_ms = _ms(self._clock() - began)
        self._follower.live(records[-1])
        self._poisoned = False
        self._updates += 1
        if staged[-1].version == route.records[-1].version:
            self._reason = None
        metrics.engine_updates.labels(result="applied").inc()
        metrics.engine_pause_seconds.observe(self._pause_ms / 1000)
        metrics.engine_version.set(records[-1].version)
        metrics.engine_poisoned.set(0)
        self._enter(EngineState.IDLE)
        logger.info(
            "weights applied version=%d stage_ms=%.1f pause_ms=%.1f apply_ms=%.1f in_flight=%d",
            records[-1].version,
            self._stage_ms or 0.0,
            self._pause_ms,
            self._apply_ms or 0.0,
            self._engine.running,
        )

    def _write(self, staged: Sequence[WeightUpdate]) -> None:
        """Inside the pause. After the first write every failure poisons the engine before it can go on."""
        self._state = EngineState.APPLYING
        began = self._clock()
        touched = False
        try:
            for update in staged:
                try:
                    self._engine.apply(update)
                except WeightUpdateError:
                    raise  # refused before anything was written
                except Exception:
                    touched = True
                    raise
                touched = True
            self._apply_ms = _ms(self._clock() - began)
            self._state = EngineState.VERIFYING
            live = self._engine.weights_hash()
            if live != staged[-1].weights_hash:
                raise WeightUpdateError("live_hash", f"{live}, expected {staged[-1].weights_hash}")
        except Exception as e:
            if touched:
                self._engine.poison()
                self._poisoned = True
            if isinstance(e, HeadraceError):
                raise
            raise EngineError(f"{type(e).__name__}: {e}") from e

    def _failed(self, route: Route, records: Sequence[WeightRecord], error: HeadraceError) -> None:
        """What is live may be anything now, and the copy of the bits is ahead of it: an anchor must come next."""
        kind = route.kind(len(records) - 1)
        self._follower.failed(records[-1].version, kind, self._clock(), final=False)
        self._follower.torn()
        result = "failed" if self._poisoned else "refused"
        metrics.engine_updates.labels(result=result).inc()
        metrics.engine_poisoned.set(int(self._poisoned))
        self._reason = f"version {records[-1].version} {result}: {error}"
        logger.error("%s", self._reason)
        self._enter(EngineState.IDLE)

    def _refused(self, reason: str) -> None:
        metrics.engine_updates.labels(result="refused").inc()
        self._reason = reason
        logger.warning("%s", reason)

    def _enter(self, state: EngineState) -> None:
        # Whoever looks for an engine to ask must see that this one refuses, whatever it does about it meanwhile.
        healing = self._poisoned and state is not EngineState.STOPPED
        self._state = EngineState.POISONED if healing else state
        self.announce()


def _ms(seconds: float) -> float:
    return seconds * 1000.0
