"""Admitted samples -> training rows, by fetching the trajectories they point at.

A sample whose payload is gone, broken or another one's is left out; the caller counts it as `payload`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...schemas.errors import InvalidMessageError
from ...schemas.sample import Sample
from ...schemas.trajectory import TRAJECTORY, Trajectory
from ...streams.blobs import BlobStore
from ...streams.claims import check_out
from .batch import Row, make_row
from .refs import RefReader

logger = logging.getLogger(__name__)


class Payloads:
    """Reads the trajectories topic by reference."""

    def __init__(self, reader: RefReader, store: BlobStore) -> None:
        self._reader, self._store = reader, store

    def rows(self, samples: Sequence[Sample]) -> list[Row | None]:
        """One row per sample, in order; None where its payload cannot be used. Raises BrokerError, BlobError."""
        records = self._reader.fetch(s.ref for s in samples)
        rows: list[Row | None] = []
        for sample in samples:
            record = records.get(sample.ref)
            try:
                if record is None:
                    raise InvalidMessageError("missing", "the log no longer holds it")
                value = check_out(record.value, record.headers, store=self._store)
                rows.append(_row(TRAJECTORY.decode(value, record.headers), sample))
            except InvalidMessageError as e:
                logger.warning(
                    "payload left out trajectory=%s partition=%d offset=%d: %s",
                    sample.trajectory_id,
                    sample.ref.partition,
                    sample.ref.offset,
                    e,
                )
                rows.append(None)
        return rows

    def close(self) -> None:
        """Release the client."""
        self._reader.close()


def _row(trajectory: Trajectory, sample: Sample) -> Row:
    if trajectory.trajectory_id != sample.trajectory_id:
        raise InvalidMessageError(
            "another", f"{trajectory.trajectory_id} is there, not {sample.trajectory_id}"
        )
    row = make_row(trajectory, sample)
    if row.trained_tokens == 0:
        raise InvalidMessageError("nothing_sampled", "no token that can be trained")
    return row
