"""Whether a broker's nodes are all there and have all the data, so that one of them may be lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from kafka.errors import KafkaError

from ...schemas.config import KafkaConfig
from ...schemas.errors import BrokerError
from ...streams.kafka import closing, make_admin
from ..broker import apache


def may_lose_one(kafka: KafkaConfig, nodes: int) -> bool:
    """True when no node is away or fenced and every partition has all its replicas in sync."""
    assert kafka.bootstrap is not None
    if not apache.usable(kafka.bootstrap, nodes):
        return False
    try:
        with closing(make_admin(kafka, client_id="headrace-chaos")) as admin:
            topics = admin.describe_topics()
    except (BrokerError, KafkaError):
        return False
    partitions = [p for topic in topics for p in topic["partitions"]]
    return bool(partitions) and all(
        len(p["isr_nodes"]) == len(p["replica_nodes"]) == nodes for p in partitions
    )


def left_over(run_dir: Path, *, besides: Sequence[int]) -> Iterator[str]:
    """Live processes that name `run_dir` in their command or their environment: `pid command`."""
    wanted = str(run_dir)
    for process in psutil.process_iter():
        try:
            if process.pid in besides or process.status() == psutil.STATUS_ZOMBIE:
                continue
            command = process.cmdline()
            if any(wanted in part for part in command) or any(
                wanted in v for v in process.environ().values()
            ):
                yield f"{process.pid} {' '.join(command)[:200]}"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
