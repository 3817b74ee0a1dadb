"""The trainer's loop: batch -> payloads -> step -> publish -> checkpoint, one version at a time.

| step       | consumes                | produces                          | waits for                    |
| ---------- | ----------------------- | --------------------------------- | ---------------------------- |
| next_batch | samples                 | a batch, offsets                  | enough samples within max_lag |
| rows       | trajectories, by ref    | rows                              | the broker                   |
| step       | rows                    | weights n+1, statistics           | -                            |
| encode     | weights n, n+1          | blobs                             | the object store             |
| commit     | record, offsets         | weights topic, committed offsets  | the broker                   |
| save       | weights, optimizer      | a checkpoint, every K versions    | the disk                     |
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from ...schemas.config import TrainerConfig
from ...schemas.weights import WeightRecord
from ...streams import metrics
from .batch import Row
from .builder import Admitted, Batch
from .checkpoint import CheckpointInfo, Checkpoints
from .payloads import Payloads
from .publish import Publisher
from .report import Timing, export, step_metrics
from .sample_list import with_samples
from .source import SampleSource
from .step import Learner

logger = logging.getLogger(__name__)


class TrainerLoop:
    """Owns nothing but the order of things."""

    def __init__(
        self,
        config: TrainerConfig,
        learner: Learner,
        publisher: Publisher,
        checkpoints: Checkpoints,
        *,
        settings: str,
        peak: float,
        consumed: tuple[tuple[int, int], ...] = (),
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`settings`: hash of the arithmetic; `peak`: FLOP/s; `consumed`: of the log's newest version."""
        self._config, self._settings, self._peak, self._now = config, settings, peak, now
        self._learner, self._publisher, self._checkpoints = learner, publisher, checkpoints
        self._consumed = consumed
        self._carried: Counter[str] = Counter()
        self._stale_in_queue = 0
        self._saved = -1

    @property
    def done(self) -> bool:
        """True when the configured number of steps is made."""
        return 0 < self._config.steps <= self._learner.version

    def announce(self, *, anchor: bool = False) -> None:
        """Publish the present weights without a step: version 0, or (`anchor`) the log's weights once more."""
        record = self._publisher.encode(self._learner.master, anchor=anchor)
        self._learner.version = record.version
        self._commit(dataclasses.replace(record, config_hash=self._settings, consumed=self._consumed))
        logger.info("anchor published version=%d hash=%016x", record.version, record.weights_hash)

    def run(self, source: SampleSource, payloads: Payloads, stopping: threading.Event) -> None:
        """Step until done or `stopping`; the step that runs is finished, and what was made is saved."""
        while not self.done:
            started = self._now()
            batch = source.next_batch(self._learner.version, stopping)
            if batch is None:
                break
            self._consumed = batch.consumed
            rows, trained = self._fetch(batch, payloads)
            if rows:
                self._step(rows, trained, source, stall=self._now() - started)
        self.save(force=True)

    def save(self, *, force: bool = False) -> None:
        """Write a checkpoint when one is due; `force`: unless this version has one."""
        version = self._learner.version
        due = force or version % self._config.checkpoint_every == 0
        if not due or version == self._saved:
            return
        info = CheckpointInfo(
            version=version,
            weights_hash=self._publisher.weights_hash,
            consumed=self._consumed,
            config_hash=self._settings,
        )
        try:
            self._checkpoints.save(info, self._learner.tensors())
        except OSError as e:
            # The steps are in the log: a later checkpoint, or a restart, makes up for this one.
            metrics.checkpoints_failed.inc()
            logger.error(
                "checkpoint of version %d cannot be written to %s (%s): training goes on; free some space, the next "
                "one is due at the next multiple of %d",
                version,
                self._checkpoints.root,
                e,
                self._config.checkpoint_every,
            )
            return
        self._saved = version

    def _fetch(self, batch: Batch, payloads: Payloads) -> tuple[list[Row], list[Admitted]]:
        self._carried.update(batch.dropped)
        self._stale_in_queue += batch.stale_in_queue
        found = payloads.rows([a.sample for a in batch.admitted])
        pairs = [(row, a) for row, a in zip(found, batch.admitted, strict=True) if row is not None]
        if len(pairs) < len(found):
            self._carried["payload"] += len(found) - len(pairs)
        return [row for row, _ in pairs], [a for _, a in pairs]

    def _step(self, rows: list[Row], trained: list[Admitted], source: SampleSource, *, stall: float) -> None:
        started = self._now()
        result = self._learner.step(rows)
        updated = self._now()
        record = self._publisher.encode(self._learner.master)
        timing = Timing(stall=stall, update=updated - started, publish=self._now() - updated)
        values = step_metrics(result, trained, timing, self._peak)
        values["stale_in_queue"] = float(self._stale_in_queue)
        record = dataclasses.replace(
            record,
            consumed=self._consumed,
            dropped=dict(self._carried),
            metrics=values,
            config_hash=self._settings,
        )
        self._commit(with_samples(record, tuple(a.at for a in trained), self._publisher.put), source)
        metrics.publish_seconds.observe(self._now() - updated)
        export(result, trained, record.dropped, values)
        self._carried.clear()
        self._stale_in_queue = 0
        self.save()
        logger.info(
            "step version=%d reward=%.3f lag_max=%d grad_norm=%.3f seconds=%.2f",
            result.version,
            values.get("reward_mean", float("nan")),
            values["lag_max"],
            values.get("grad_norm", float("nan")),
            values["step_seconds"],
        )

    def _commit(self, record: WeightRecord, source: SampleSource | None = None) -> None:
        self._publisher.commit(record, source.refused if source is not None else ())
        if source is not None:
            source.refused.clear()
