"""What Arrow takes at most while something runs."""

import contextlib
from collections.abc import Iterator

import pyarrow as pa


@contextlib.contextmanager
def watched_pool() -> Iterator[pa.MemoryPool]:
    """A pool that everything of Arrow's is taken from meanwhile; `max_memory()` is its peak in bytes."""
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(usual)
