"""The broker's time from deliveries: never early, however wrong the worker's own clock is."""

from __future__ import annotations

import random

import pytest

from headrace.streams.broker_clock import BUCKET_MS, BrokerClock


@pytest.mark.parametrize("ahead_ms", [-3_600_000, -5000, 0, 5000, 3_600_000])
def test_the_time_is_late_by_the_quickest_delivery_and_never_early(ahead_ms: int) -> None:
    clock, rng = BrokerClock(), random.Random(1)
    delays = [rng.randrange(3, 400) for _ in range(50)]
    for i, delay in enumerate(delays):
        local = 10**12 + i * 100
        clock.note(appended_ms=local - delay + ahead_ms, now_ms=local)
        assert clock.at(local) <= local + ahead_ms
    assert clock.at(10**12) == 10**12 + ahead_ms - min(delays)


def test_a_clock_that_is_set_is_followed_within_two_minutes() -> None:
    clock = BrokerClock()
    now = 10 * BUCKET_MS
    clock.note(appended_ms=now + 60_000, now_ms=now)
    for later in range(1, 4):  # the local clock was put forward by a minute
        clock.note(appended_ms=now + later * BUCKET_MS - 1, now_ms=now + later * BUCKET_MS)
    assert clock.ahead_ms == -1


def test_before_the_first_delivery_the_own_clock_has_to_do() -> None:
    assert BrokerClock().at(5) == 5
