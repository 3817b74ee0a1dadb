"""A trainer that kills or stops itself at a chosen call: `python trainer_kills.py CONFIG POINT NTH [stop] [few]
[die-at-version-5]`.

`few`: a list of more than 4 samples is too long for the weight record.

Points lie in and between everything that a step does, so that no timing decides where a kill falls.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import kafka
import torch

from headrace.consumers.trainer import checkpoint, role, sample_list
from headrace.consumers.trainer.payloads import Payloads
from headrace.consumers.trainer.step import Learner
from headrace.schemas.config_file import load_config
from headrace.streams.blob_files import Buffer
from headrace.streams.blobs import BlobRef, BlobStore

Act = Callable[..., Any]


def die(*args: Any, **kwargs: Any) -> None:
    """As from outside: nothing is flushed, closed or caught."""
    os.kill(os.getpid(), signal.SIGKILL)


def before(original: Act) -> Act:
    """Dies in place of the call."""
    return die


def after(original: Act) -> Act:
    """Dies when the call has returned."""

    def act(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        die()

    return act


def during(original: Act) -> Act:
    """Dies a little after the call has begun, while it waits for its answers."""

    def act(*args: Any, **kwargs: Any) -> Any:
        threading.Timer(0.002, die).start()
        return original(*args, **kwargs)

    return act


def stopped(original: Act) -> Act:
    """Stops (SIGSTOP) before the call, which goes on when somebody continues the process.

    What a producer was given before is at the broker then.
    """

    def act(*args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], kafka.KafkaProducer):
            args[0].flush()
        os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **kwargs)

    return act


def full_disk(original: Act) -> Act:
    """The call may write 4 KB to each file; nobody dies."""

    def act(*args: Any, **kwargs: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            return original(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return act


def torn_file(original: Act) -> Act:
    """Dies with half of a checkpoint's tensors in their file."""

    def act(tensors: Any, path: Path) -> None:
        original(tensors, path)
        os.truncate(path, path.stat().st_size // 2)
        die()

    return act


def torn_blob(original: Act) -> Act:
    """Dies with half of a blob in its temporary file."""

    def act(self: BlobStore, stem: str, pieces: Iterable[Buffer]) -> BlobRef:
        def half() -> Iterator[Buffer]:
            whole = b"".join(pieces)
            yield whole[: len(whole) // 2]
            die()

        return original(self, stem, half())

    return act


POINTS: dict[str, tuple[Any, str, Callable[[Act], Act]]] = {
    "fetch": (Payloads, "rows", before),
    "fetched": (Payloads, "rows", after),
    "forward": (Learner, "_backward", before),
    "backward": (Learner, "_backward", after),
    "optimizer": (torch.optim.AdamW, "step", after),
    "blob": (BlobStore, "put_stream", torn_blob),
    "stored": (BlobStore, "put_stream", after),
    "begin": (kafka.KafkaProducer, "begin_transaction", before),
    "sent": (kafka.KafkaProducer, "send_offsets_to_transaction", before),
    "offsets": (kafka.KafkaProducer, "send_offsets_to_transaction", after),
    "committing": (kafka.KafkaProducer, "commit_transaction", during),
    "committed": (kafka.KafkaProducer, "commit_transaction", after),
    "checkpoint": (checkpoint, "save_file", torn_file),
    "full": (checkpoint, "save_file", full_disk),
    "renaming": (Path, "rename", before),
    "renamed": (Path, "rename", after),
    "removing": (shutil, "rmtree", before),
}
"""Name -> where the call is, and what is done instead of the n-th one."""


def arm(point: str, nth: int, *, stop: bool = False) -> None:
    """Let the `nth` call (1 is the first) at `point` end this process, or `stop` it."""
    owner, name, kind = POINTS[point]
    original = getattr(owner, name)
    act = stopped(original) if stop else kind(original)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return (act if calls == nth else original)(*args, **kwargs)

    setattr(owner, name, counted)


if __name__ == "__main__":
    logging.basicConfig(level="INFO")
    logging.getLogger("kafka").setLevel("WARNING")
    if len(sys.argv) > 2:
        if "die-at-version-5" in sys.argv:
            arm("committed", 6)  # the first is version 0
        if "few" in sys.argv:
            sample_list.INLINE_SAMPLES = 4
        arm(sys.argv[2], int(sys.argv[3]), stop="stop" in sys.argv)
    sys.exit(role.main(load_config(Path(sys.argv[1]))))
