"""The engine role as a process in front of an SGLang server: topic to server, tokens to client, a restart between."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from sglang_stub import SglangStub, recomputed
from test_engine_role import RUN, Publisher, read_until

from headrace.producers.engines.client import HttpEngineClient
from headrace.producers.engines.protocol import GenerateRequest
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import EngineError
from headrace.schemas.topics import ENGINES, Topics
from headrace.streams.kafka import closing, create_topics, make_consumer, partitions_of

VOCAB = 37


@pytest.fixture
def stub():
    made = SglangStub({"a": np.zeros((30, 10), np.uint16)}, vocab_size=VOCAB, api_key="s3cret").start()
    yield made
    made.stop()


@pytest.fixture
def config(broker, namespace, tmp_path, stub) -> Config:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    sglang = {"checkpoint_dir": tmp_path / "weights", "api_key_env": "STUB_KEY", "watch_seconds": 0.2}
    made = Config.model_validate(
        {
            "run": {"namespace": namespace, "dir": str(tmp_path)},
            "kafka": broker.config.model_dump(),
            "policy": {"model": tmp_path / "model"},
            "engine": {"kind": "sglang", "url": stub.url, "sglang": sglang},
        }
    )
    create_topics(made.kafka, Topics(namespace), [made.policy.id])
    return made


def test_the_role_keeps_a_server_on_the_topics_weights_through_its_restart(config, tmp_path, stub):
    publisher = Publisher(config)
    publisher.anchor()
    publisher.delta()
    path, log = tmp_path / "config.json", tmp_path / "log"
    dump_config(config, path)
    environment = {**os.environ, "STUB_KEY": "s3cret"}
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-c", RUN, str(path)], env=environment, stderr=errors)
    try:
        with closing(make_consumer(config.kafka, client_id="test")) as consumer:
            consumer.assign(partitions_of(consumer, Topics(config.run.namespace).name(ENGINES)))
            consumer.seek_to_beginning()
            for version in (1, 2):
                seen = read_until(
                    consumer, lambda s, v=version: s.version == v and s.state is EngineState.IDLE
                )
                assert seen[-1].weights_hash == publisher.hashes[version] == stub.hash
                asyncio.run(check_served(seen[-1].url, version, publisher.hashes[version]))
                if version == 1:
                    stub.restart()
                    asyncio.run(check_served(seen[-1].url, version, publisher.hashes[version]))
                    publisher.delta()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        publisher.producer.close()
        process.kill()
        process.wait()
    assert not list((tmp_path / "weights").iterdir())
    assert "s3cret" not in log.read_text() + path.read_text()


async def check_served(url: str, version: int, weights_hash: int) -> None:
    """Tokens of `version`, at last: a server that has just been restarted is refused until it has the weights again."""
    client = HttpEngineClient(url)
    request = GenerateRequest(request_id="r", token_ids=(1, 2), max_tokens=20)
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    result = await client.generate(request)
                    break
                except EngineError:
                    await asyncio.sleep(0.05)
    finally:
        await client.close()
    assert [(s.version, s.start, s.end) for s in result.version_spans] == [(version, 0, 20)]
    expected = recomputed(request.token_ids, result.token_ids, weights_hash, VOCAB)
    assert list(zip(result.token_ids, result.logprobs, strict=True)) == expected
