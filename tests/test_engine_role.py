"""The engine role as a process: it follows the weights topic, serves over HTTP and reports on `engines`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from headrace.producers.engines.client import HttpEngineClient
from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.scripted import scripted_token
from headrace.schemas.codec import SCHEMA_HEADER
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.delta import encode_anchor, encode_delta
from headrace.schemas.engine import ENGINE, EngineState
from headrace.schemas.errors import EngineError
from headrace.schemas.topics import DEADLETTERS, ENGINES, WEIGHTS, Topics
from headrace.schemas.weight_hash import set_hash
from headrace.schemas.weights import WEIGHTS as WEIGHTS_RECORD
from headrace.schemas.weights import BlobKind, WeightBlob, WeightRecord
from headrace.streams.blobs import BlobStore
from headrace.streams.kafka import closing, create_topics, make_consumer, make_producer, partitions_of

RUN = """
import logging, sys
from pathlib import Path
from headrace.schemas.config_file import load_config
from headrace.producers.engines.role import main
logging.basicConfig(level=logging.INFO)
sys.exit(main(load_config(Path(sys.argv[1])), "engine-7"))
"""


STUCK = """
import logging, sys, threading
from pathlib import Path
from headrace.producers.engines import role
from headrace.producers.engines.scripted import ScriptedEngine
from headrace.schemas.config_file import load_config


class Stuck(ScriptedEngine):
    def _write(self, update):
        if update.version == 2:
            self._weights["a"].reshape(-1)[::2] ^= 1  # torn
            Path(sys.argv[2]).touch()
            threading.Event().wait()
        super()._write(update)


logging.basicConfig(level=logging.INFO)
role.make_engine = lambda config, engine_id: Stuck()
sys.exit(role.main(load_config(Path(sys.argv[1])), "engine-7"))
"""


class Publisher:
    """Publishes made-up weights as a trainer would."""

    def __init__(self, config: Config) -> None:
        self.config, self.store = config, BlobStore(config.store_uri)
        self.topic = Topics(config.run.namespace).name(WEIGHTS, config.policy.id)
        self.producer = make_producer(config.kafka, client_id="publisher")
        self.weights = {"a": np.arange(300, dtype=np.uint16).reshape(30, 10)}
        self.version = -1
        self.hashes: list[int] = []

    def _blob(self, kind: BlobKind, data: bytes) -> WeightBlob:
        ref = self.store.put(f"weights/{self.version}-{kind}", data)
        return WeightBlob(kind=kind, uri=ref.name, size=ref.size, sha256=ref.sha256)

    def anchor(self) -> None:
        self.version += 1
        total = set_hash(self.weights)
        self._send(None, total, self._blob(BlobKind.ANCHOR, encode_anchor(self.weights, self.version, total)))

    def delta(self) -> None:
        new = {"a": self.weights["a"].copy()}
        new["a"].reshape(-1)[self.version * 7 % 300] += 3
        self.version += 1
        made = encode_delta(self.weights, new, base_version=self.version - 1, version=self.version)
        self.weights = new
        self._send(made.base_hash, made.weights_hash, self._blob(BlobKind.DELTA, made.blob))

    def _send(self, base_hash: int | None, total: int, blob: WeightBlob) -> None:
        record = WeightRecord(
            policy_id=self.config.policy.id,
            version=self.version,
            base_version=None if base_hash is None else self.version - 1,
            base_hash=base_hash,
            weights_hash=total,
            blobs=(blob,),
        )
        headers = [(SCHEMA_HEADER, WEIGHTS_RECORD.tag.encode())]
        value = WEIGHTS_RECORD.encode(record)
        self.producer.send(self.topic, key=b"policy", value=value, headers=headers).get(10)
        self.hashes.append(total)


@pytest.fixture
def config(broker, namespace, tmp_path) -> Config:
    made = Config.model_validate(
        {
            "run": {"namespace": namespace, "dir": str(tmp_path)},
            "kafka": broker.config.model_dump(),
            "engine": {"kind": "scripted"},
        }
    )
    create_topics(made.kafka, Topics(namespace), [made.policy.id])
    return made


def read_until(consumer, wanted, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    seen = []
    while time.monotonic() < deadline:
        for records in consumer.poll(timeout_ms=200).values():
            for record in records:
                seen.append(ENGINE.decode(record.value, record.headers))
                if wanted(seen[-1]):
                    return seen
    raise AssertionError(f"not seen; the last were {seen[-3:]}")


def test_the_role_follows_the_topic_serves_and_stops_on_sigterm(config: Config, tmp_path: Path) -> None:
    publisher = Publisher(config)
    publisher.anchor()
    publisher.delta()
    path = tmp_path / "config.json"
    dump_config(config, path)
    topics = Topics(config.run.namespace)
    process = subprocess.Popen([sys.executable, "-c", RUN, str(path)], env=os.environ)
    try:
        with closing(make_consumer(config.kafka, client_id="test")) as consumer:
            partitions = partitions_of(consumer, topics.name(ENGINES))
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            seen = read_until(consumer, lambda s: s.version == 1 and s.state is EngineState.IDLE)
            assert seen[0].version == -1
            assert seen[-1].weights_hash == publisher.hashes[1]
            assert seen[-1].pause_ms is not None
            # a record that is no record does not stop what comes behind it
            publisher.producer.send(publisher.topic, key=b"policy", value=b"garbage").get(10)
            publisher.delta()
            seen = read_until(consumer, lambda s: s.version == 2 and s.state is EngineState.IDLE)
            assert seen[-1].weights_hash == publisher.hashes[2]
            asyncio.run(_call(seen[-1].url))
            process.send_signal(signal.SIGTERM)
            read_until(consumer, lambda s: s.state is EngineState.STOPPED)
        assert process.wait(20) == 0
        with closing(make_consumer(config.kafka, client_id="test")) as consumer:
            letters = partitions_of(consumer, topics.name(DEADLETTERS))
            consumer.assign(letters)
            consumer.seek_to_beginning(*letters)
            values = [r.value for rs in consumer.poll(timeout_ms=5000).values() for r in rs]
            assert values == [b"garbage"]
    finally:
        publisher.producer.close()
        process.kill()
        process.wait()


async def _call(url: str) -> None:
    client = HttpEngineClient(url)
    try:
        result = await client.generate(GenerateRequest(request_id="r", token_ids=(1, 2), max_tokens=1))
        assert result.token_ids == (scripted_token([1, 2], 2, 64)[0],)
        assert [(s.version, s.start, s.end) for s in result.version_spans] == [(2, 0, 1)]
        info = await client.info()
        assert json.dumps(info) and info["engine_id"] == "engine-7" and info["version"] == 2
    finally:
        await client.close()


def test_an_engine_killed_in_the_middle_of_a_write_comes_back_whole_and_obeys_an_operator(
    config: Config, tmp_path: Path
) -> None:
    publisher = Publisher(config)
    publisher.anchor()
    publisher.delta()
    path, writing = tmp_path / "config.json", tmp_path / "writing"
    dump_config(config, path)
    engines = Topics(config.run.namespace).name(ENGINES)
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(path), str(writing)], env=os.environ)
    try:
        with closing(make_consumer(config.kafka, client_id="test")) as consumer:
            consumer.assign(partitions_of(consumer, engines))
            seen = read_until(consumer, lambda s: s.version == 1 and s.state is EngineState.IDLE)
            publisher.delta()
            seen = read_until(consumer, lambda s: s.state is EngineState.PAUSING)
            while not writing.exists():
                assert process.poll() is None
                time.sleep(0.01)
            asyncio.run(_hears_nothing(seen[-1].url, process))
            process = subprocess.Popen([sys.executable, "-c", RUN, str(path)], env=os.environ)
            seen = read_until(consumer, lambda s: s.version == 2 and s.state is EngineState.IDLE)
            assert seen[-1].weights_hash == publisher.hashes[2] and seen[-1].behind == 0
            url = seen[-1].url
            assert _post(f"{url}/pause") == {"paused": True, "version": 2}
            read_until(consumer, lambda s: s.held is True)
            publisher.delta()
            seen = read_until(consumer, lambda s: s.version == 3 and s.state is EngineState.IDLE)
            assert seen[-1].held is True and seen[-1].paused is False
            assert seen[-1].weights_hash == publisher.hashes[3]
            assert _post(f"{url}/resume") == {"paused": False, "version": 3}
            read_until(consumer, lambda s: s.held is False)
            assert _post(f"{url}/pause")["paused"] is True
            process.send_signal(signal.SIGTERM)  # ends although an operator holds it
        assert process.wait(20) == 0
    finally:
        publisher.producer.close()
        process.kill()
        process.wait()


async def _hears_nothing(url: str, process: "subprocess.Popen[bytes]") -> None:
    """A request to an engine in the middle of a write gets no token, and fails when the engine is killed."""
    client = HttpEngineClient(url)
    try:
        request = GenerateRequest(request_id="r", token_ids=(1, 2), max_tokens=1)
        asking = asyncio.create_task(client.generate(request))
        while (await client.info())["running"] == 0:  # noqa: ASYNC110  (it has arrived, in another process)
            await asyncio.sleep(0.01)
        assert not asking.done()
        process.kill()
        process.wait()
        with pytest.raises(EngineError):
            await asking
    finally:
        await client.close()


def _post(url: str) -> dict:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=20) as answer:
        return json.loads(answer.read())
