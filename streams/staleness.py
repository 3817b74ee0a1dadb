"""The one definition of lag, used at admission, at the gate before `samples`, and by the trainer at consumption.

lag = (version being updated) - (oldest version among the trained tokens); 0 is on-policy. A trainer about to
make version 8 updates version 7: a sample whose oldest token is version 7 has lag 0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lag:
    """A sample's lag in versions and where it arose: total = in_flight + in_queue."""

    in_flight: int
    """Versions that passed while its tokens were being sampled."""
    in_queue: int
    """Versions that passed since its last token."""

    @property
    def total(self) -> int:
        """What max_lag limits."""
        return self.in_flight + self.in_queue


def lag_of(*, current_version: int, version_min: int, version_max: int) -> Lag:
    """Lag of tokens sampled under [version_min, version_max] for an update of `current_version`.

    An engine may already serve a version that this reader has not seen; in_queue is then 0, not negative.
    """
    return Lag(in_flight=version_max - version_min, in_queue=max(0, current_version - version_max))


def is_stale(lag: Lag, max_lag: int) -> bool:
    """True when the sample must not be trained."""
    return lag.total > max_lag


def admission_capacity(*, max_lag: int, version: int, batch_size: int, accepted: int, running: int) -> int:
    """How many more rollouts may start, so that none need be dropped as stale (AReaL, arXiv 2505.24298, eq. 3).

    `accepted`: rollouts that have been or still may be trained; `running`: those in flight. At version v the
    trainer has used v * batch_size of them, so at most (max_lag + 1) * batch_size are ahead of it.
    """
    return max(0, (max_lag + version + 1) * batch_size - (accepted + running))
