"""Streams workers as processes of their own, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.schemas.config import Config, KafkaConfig
from headrace.schemas.config_file import dump_config
from headrace.schemas.topics import Topics
from headrace.streams.kafka import create_topics

CODE = """
import logging, sys
from pathlib import Path
from headrace.schemas.config_file import load_config
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
logging.getLogger("kafka").setLevel(logging.ERROR)
from headrace.streams.worker import main
sys.exit(main(load_config(Path(sys.argv[1]))))
"""


def config_for(kafka: KafkaConfig, namespace: str, folder: Path, **sections: Any) -> Config:
    """A configuration for streams tests, its topics made."""
    config = Config.model_validate(
        {
            "run": {"namespace": namespace, "dir": str(folder)},
            "kafka": kafka.model_dump(),
            "verify": {"reward": "calculator"},
            **sections,
        }
    )
    create_topics(config.kafka, Topics(namespace), [config.policy.id])
    return config


class StreamsProcess:
    """One worker; its output goes to a file in its folder."""

    def __init__(self, config: Config, folder: Path, *, code: str = CODE, name: str = "streams") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        dump_config(config, path)
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(path)],
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
                },
            )

    def kill(self) -> None:
        """End it at once, as a lost machine would."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 40.0) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def streams_worker(config: Config, folder: Path) -> Iterator[StreamsProcess]:
    """A worker that runs inside the block; what it wrote is shown when the test fails."""
    worker = StreamsProcess(config, folder)
    try:
        yield worker
    finally:
        worker.kill()
        print(worker.log.read_text()[-6000:])
