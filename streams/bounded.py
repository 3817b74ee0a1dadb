"""A limit on calls that have none: kafka-python waits for ever for a transaction that a broker's end cut in two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kafka.errors import KafkaTimeoutError

T = TypeVar("T")

TRANSACTION_SECONDS = 30.0
"""A broker that comes back, or another one of the cluster, finishes a transaction in a fraction of this."""


def bounded(call: Callable[[], T], *, limit_s: float, what: str) -> T:
    """The result of `call`, or what it raised; KafkaTimeoutError(`what`) when it takes longer than `limit_s`.

    A call that is given up goes on in a thread of its own, whose client must not be used again.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise KafkaTimeoutError(f"{what} was not done after {limit_s:.0f} s")
    return results[0]
