"""A map over threads that keeps the order and looks only a few items ahead: memory stays bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[tuple[T, R]]:
    """(item, work(item)) in the order of `items`; worth it where the work releases the GIL."""
    if threads <= 1:
        for item in items:
            yield item, work(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="codec") as pool:
        waiting: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) > threads:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
