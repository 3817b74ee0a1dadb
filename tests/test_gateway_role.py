"""The gateway's process on a real broker: nothing that `finish` has acknowledged is lost or doubled by kill -9."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway_http_kit import HTTP, Speaker, in_turn
from gateway_kit import tokenizer

from headrace.producers.engines.server import EngineServer, HttpServer, bind, url_of
from headrace.producers.gateway.spool import Spool
from headrace.schemas.codec import POLICY_HEADER, SCHEMA_HEADER
from headrace.schemas.config import Config
from headrace.schemas.config_file import dump_config
from headrace.schemas.engine import ENGINE, EngineState, EngineStatus
from headrace.schemas.topics import ENGINES, FEEDBACK, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.kafka import closing, create_topics, make_consumer, make_producer, partitions_of

RUN = """
import sys
from pathlib import Path
from headrace.deploy.commands_roles import configure_logging
from headrace.producers.gateway.role import main
from headrace.schemas.config_file import load_config
configure_logging()
sys.exit(main(load_config(Path(sys.argv[1]))))
"""
HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def config(embedded_broker, namespace, tmp_path) -> Config:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    made = Config.model_validate(
        {
            "run": {"namespace": namespace, "dir": str(tmp_path)},
            "kafka": embedded_broker.config.model_dump(),
            "policy": {"model": str(tmp_path)},
            "gateway": {"port": 0, "idle_seconds": 60, "patience_seconds": 15},
        }
    )
    create_topics(made.kafka, Topics(namespace), [made.policy.id])
    dump_config(made, tmp_path / "config.json")
    return made


@pytest.fixture
def engine(config: Config) -> Iterator[Speaker]:
    """An engine on a port, announced on the log."""
    speaker = Speaker(in_turn("ok"))
    loop = asyncio.new_event_loop()
    listening = bind("127.0.0.1", 0)
    server = HttpServer(EngineServer(speaker).app)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listening])))
    thread.start()
    status = EngineStatus(
        engine_id="engine-0", policy_id="policy", state=EngineState.IDLE, version=3, url=url_of(listening)
    )
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        headers = [(SCHEMA_HEADER, ENGINE.tag.encode()), (POLICY_HEADER, b"policy")]
        topic = Topics(config.run.namespace).name(ENGINES)
        producer.send(topic, key=b"engine-0", value=ENGINE.encode(status), headers=headers).get(10)
    yield speaker
    server.should_exit = True
    thread.join(10)
    loop.close()


@contextlib.contextmanager
def gateway(config: Config) -> Iterator[tuple[subprocess.Popen, str]]:
    """(process, url); killed at the end."""
    log = Path(config.run.dir) / f"gateway-{time.monotonic_ns()}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(config.run.dir / "config.json")], env=os.environ, stderr=file
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"url=(\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def records(config: Config, topic: str, enough, seconds: float = 20.0) -> list:
    """What is in a topic, once `enough` of it is, or after `seconds`."""
    found: list = []
    with closing(make_consumer(config.kafka, client_id="test")) as consumer:
        partitions = partitions_of(consumer, Topics(config.run.namespace).name(topic))
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        deadline = time.monotonic() + seconds
        while not enough(found) and time.monotonic() < deadline:
            for some in consumer.poll(timeout_ms=100).values():
                found += some
        for some in consumer.poll(timeout_ms=300).values():
            found += some
    return found


def test_what_finish_acknowledged_is_in_the_topic_once_after_kill_9(config: Config, engine: Speaker) -> None:
    finished = []
    with gateway(config) as (process, url):
        for i in range(6):
            answer = HTTP.post(url + "/v1/chat/completions", json=HI, headers={"session-id": str(i)})
            assert answer.status_code == 200, answer.text
            rollout = answer.headers["x-headrace-rollout"]
            ended = HTTP.post(f"{url}/rollouts/{rollout}/finish")
            assert ended.json()["trajectories"] == 1
            finished.append(rollout)
        process.kill()
    spool = Path(config.run.dir) / "gateway-spool"
    # One that Kafka has and one that it has not, as a kill between two steps leaves them.
    have = records(config, TRAJECTORIES, lambda r: False, seconds=1.0)
    if have:
        kept = TRAJECTORY.decode(have[0].value, have[0].headers)
        Spool(spool, most_bytes=1 << 30).write([kept], now_ms=int(time.time() * 1000))
    with gateway(config):
        seen = records(config, TRAJECTORIES, lambda r: len(r) >= 6)
    assert Counter(r.key.decode() for r in seen) == Counter(finished)
    assert not list(spool.glob("*.rollout"))


def test_the_process_finishes_what_is_open_on_sigterm_and_sends_feedback(
    config: Config, engine: Speaker
) -> None:
    with gateway(config) as (process, url):
        answer = HTTP.post(url + "/v1/chat/completions", json=HI)
        rollout = answer.headers["x-headrace-rollout"]
        body = {"name": "accepted", "value": 1, "key": "k"}
        assert HTTP.post(f"{url}/rollouts/{rollout}/feedback", json=body).status_code == 200
        process.terminate()
        assert process.wait(30) == 0
    seen = records(config, TRAJECTORIES, lambda r: len(r) >= 1)
    row = TRAJECTORY.decode(seen[0].value, seen[0].headers)
    assert row.rollout_id == rollout
    assert json.loads(row.messages or "")[-1] == {"role": "assistant", "content": "ok"}
    assert records(config, FEEDBACK, lambda r: len(r) >= 1)[0].key == rollout.encode()
