"""`snapshot` on both brokers: positions, lags, ages and versions of stages that stopped at known places."""

from __future__ import annotations

import json
import time

import pytest
from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.codec import version_headers
from headrace.schemas.config import Config, KafkaConfig, RunConfig
from headrace.schemas.engine import ENGINE, EngineState, EngineStatus
from headrace.schemas.errors import BrokerUnreachableError
from headrace.schemas.topics import ENGINES, SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.topics import WEIGHTS as WEIGHTS_TOPIC
from headrace.schemas.weights import WEIGHTS, BlobKind, WeightBlob, WeightRecord
from headrace.streams.kafka import closing, create_topics, make_consumer, make_producer
from headrace.streams.status import snapshot


def config_for(broker: Broker, namespace: str) -> Config:
    return Config(run=RunConfig(namespace=namespace), kafka=broker.config)


def weights(version: int) -> bytes:
    blob = WeightBlob(kind=BlobKind.ANCHOR, uri=f"w{version}", size=1, sha256="0" * 64)
    return WEIGHTS.encode(
        WeightRecord(
            policy_id="policy",
            version=version,
            base_version=None,
            base_hash=None,
            weights_hash=version,
            blobs=(blob,),
            metrics={"reward_mean": version / 10},
            created_ms=int(time.time() * 1000),
        )
    )


def engine(version: int, engine_id: str = "engine-0", state: EngineState = EngineState.IDLE) -> bytes:
    return ENGINE.encode(
        EngineStatus(engine_id=engine_id, policy_id="policy", state=state, version=version, pause_ms=2.5)
    )


def test_a_run_without_topics_is_empty(broker: Broker, namespace: str) -> None:
    status = snapshot(config_for(broker, namespace))
    assert [(s.stage, s.position, s.lag_records, s.version) for s in status.stages] == [
        ("verify", 0, 0, None),
        ("advantage", 0, 0, None),
        ("trainer", 0, 0, None),
        ("engines", 0, 0, None),
    ]
    assert status.version is None and status.engines == ()


def test_each_stage_tells_position_lag_age_and_version(broker: Broker, namespace: str) -> None:
    config, topics = config_for(broker, namespace), Topics(namespace)
    create_topics(broker.config, topics, ["policy"])
    trajectories, scores = topics.name(TRAJECTORIES), topics.name(SCORES)
    samples = topics.name(SAMPLES, "policy")
    with closing(make_producer(broker.config, client_id="test", transactional_id=namespace)) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        for n in range(40):
            producer.send(trajectories, b"v", partition=n % 4, headers=version_headers("t", "policy", n, n))
        for n in range(8):
            producer.send(scores, b"v", partition=n % 4, headers=version_headers("s", "policy", n, n))
        for _ in range(3):
            producer.send(samples, b"v", partition=0)
        producer.commit_transaction()
        for n in range(3):
            producer.begin_transaction()
            producer.send(topics.name(WEIGHTS_TOPIC, "policy"), weights(n))
            producer.commit_transaction()
        producer.begin_transaction()
        for n in range(2):
            producer.send(topics.name(ENGINES), engine(n), key=b"engine-0")
        producer.send(topics.name(ENGINES), engine(2, "engine-1"), key=b"engine-1")
        producer.send(topics.name(ENGINES), engine(0, "gone", EngineState.STOPPED), key=b"gone")
        producer.commit_transaction()
    with closing(
        make_consumer(broker.config, client_id="test", group_id=topics.group("streams"))
    ) as consumer:
        positions = {TopicPartition(trajectories, p): 7 for p in range(4)}
        positions |= {TopicPartition(scores, p): 2 for p in range(4)}
        consumer.assign(list(positions))
        consumer.commit({tp: OffsetAndMetadata(n, "", -1) for tp, n in positions.items()})

    later = int(time.time() * 1000) + 5000
    status = snapshot(config, now_ms=later)
    verify, advantage, trainer, engines = status.stages
    # Transaction markers take offsets too, so the lag of topics written by transactions is an upper bound.
    assert verify.position == 28 and 12 <= verify.lag_records <= 16
    assert verify.version == 31 and 4 < verify.oldest_age_s < 60
    assert advantage.position == 8 and advantage.oldest_age_s == 0.0 and advantage.version == 7
    assert trainer.position == 0 and trainer.lag_records >= 3 and trainer.version == 2
    assert engines.version == 1 and engines.lag_records == 1 and engines.oldest_age_s >= 4
    assert {e.engine_id: e.version for e in status.engines} == {"engine-0": 1, "engine-1": 2, "gone": 0}
    assert status.version == 2 and status.metrics == {"reward_mean": 0.2}
    assert json.loads(json.dumps(status.as_json()))["stages"]["verify"]["position"] == 28


def test_no_broker_is_an_error_that_names_the_address() -> None:
    config = Config(kafka=KafkaConfig(bootstrap="127.0.0.1:9"))
    with pytest.raises(BrokerUnreachableError, match=r"127\.0\.0\.1:9"):
        snapshot(config)
