"""The streams worker on both brokers: good, bad and hostile records, each accounted for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from streams_records import a_trajectory, records_of, take, trajectory_headers
from streams_workers import config_for, streams_worker

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.deadletter import original_headers, read_dead_letter
from headrace.schemas.sample import SAMPLE, Fate, Sample
from headrace.schemas.score import SCORE, Ref, ScoreStatus
from headrace.schemas.topics import DEADLETTERS, SAMPLES, SCORES, TRAJECTORIES, Topics
from headrace.schemas.trajectory import TRAJECTORY, Trajectory, TrajectoryStatus
from headrace.streams.blobs import BlobStore
from headrace.streams.claims import check_in
from headrace.streams.kafka import closing, make_consumer, make_producer

REWARDS = """
import asyncio, time

def half(rollout):
    return {"reward": 0.5, "length": len(rollout.answer)}

async def raises(rollout):
    raise ValueError("a bug of the user's own")

def hangs(rollout):
    time.sleep(3600)
"""


def with_list_offsets(value: bytes, wrong: tuple[int, ...]) -> bytes:
    """`value` with the offsets (0, n) of its token_ids replaced inside the encoded buffer."""
    n = len(TRAJECTORY.decode(value).token_ids)
    right = np.array([0, n], dtype=np.int32).tobytes()
    assert right in value
    return value.replace(right, np.array(wrong, dtype=np.int32).tobytes(), 1)


def three_rows_with_a_wild_offset() -> bytes:
    """An Arrow stream of three lists whose offsets (0, 3, 6, 9) have become (0, 3, 1000, 9)."""
    batch = pa.record_batch({"token_ids": pa.array([[1, 2, 3]] * 3, type=pa.list_(pa.int32()))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    right = np.array([0, 3, 6, 9], dtype=np.int32).tobytes()
    value: bytes = sink.getvalue().to_pybytes()
    assert right in value
    return value.replace(right, np.array([0, 3, 1000, 9], dtype=np.int32).tobytes(), 1)


def shortened(t: Trajectory) -> bytes:
    """A record of 5 token ids and 4 logprobs, as only a broken producer writes it."""
    row = TRAJECTORY.to_row(t) | {
        "token_ids": np.arange(5, dtype=np.int32),
        "loss_mask": np.array([False, True, True, True, True]),
        "logprobs": np.full(4, -0.5, dtype=np.float32),
    }
    batch = pa.RecordBatch.from_pylist(
        [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()}],
        schema=TRAJECTORY.schema,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    result: bytes = sink.getvalue().to_pybytes()
    return result


class BadKey(str):
    """A header key that is not UTF-8 on the wire."""

    def encode(self, *args: Any) -> bytes:
        return b"\xff\xfe-key"


GOOD = a_trajectory("good")
BAD_RECORDS: dict[str, tuple[bytes | None, list[tuple[str, bytes]], str]] = {
    "garbage": (b"\x00\xffnot an arrow stream" * 9, [("schema", b"trajectory/1")], "not_arrow"),
    "empty": (b"", [], "empty_value"),
    "tombstone": (None, [("k", b"v")], "empty_value"),
    "length": (shortened(a_trajectory("x")), trajectory_headers(GOOD), "length_mismatch"),
    "wild offsets": (three_rows_with_a_wild_offset(), [], "not_arrow"),
    "wild list": (
        with_list_offsets(TRAJECTORY.encode(GOOD), (0, 1000)),
        trajectory_headers(GOOD),
        "not_arrow",
    ),
    "newer": (TRAJECTORY.encode(GOOD), [("schema", b"trajectory/9")], "newer_major"),
    "claim": (b"{}", [("claim", b"1")], "claim"),
    "lost blob": (
        json.dumps({"blob": "payloads/none", "size": 3, "sha256": "0" * 64}).encode(),
        [("claim", b"1")],
        "claim",
    ),
    "deadline": (
        TRAJECTORY.encode(a_trajectory("d", group_deadline_ms=int(time.time() * 1000) + 10**9)),
        trajectory_headers(GOOD),
        "group_deadline",
    ),
}


def test_every_record_is_accounted_for_and_none_stops_a_partition(
    broker: Broker, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    config = config_for(
        broker.config,
        namespace,
        tmp_path,
        verify={"reward": "calculator", "timeout_seconds": 1.0},
        rollout={"group_seconds": 20.0},
    )
    topics = Topics(namespace)
    sent: dict[str, Any] = {}
    odd_headers = [*trajectory_headers(GOOD), ("x-odd", b"\xff\xfe\x00"), ("traceparent", b"00-ab-cd-01")]

    with closing(make_producer(config.kafka, client_id="test")) as producer:

        def send(
            name: str, value: bytes | None, headers: list[tuple[str, bytes]], key: bytes = b"\xffk"
        ) -> None:
            future = producer.send(
                topics.name(TRAJECTORIES), key=key, value=value, headers=headers, partition=0
            )
            sent[name] = future.get(10)

        def send_good(name: str, *, headers: list[tuple[str, bytes]] | None = None, **fields: Any) -> None:
            t = a_trajectory(name, **{"group": name, **fields})
            send(name, TRAJECTORY.encode(t), headers or trajectory_headers(t), t.rollout_id.encode())

        def spec(name: str) -> str:
            return json.dumps({"name": name})

        with streams_worker(config, tmp_path) as worker:
            send_good("right", headers=odd_headers)
            for name, (value, headers, _) in BAD_RECORDS.items():
                send(name, value, headers)
            send_good("wrong", answer="84$")
            send_good("own", reward_spec=spec("own_rewards:half"))
            send_good("raised", reward_spec=spec("own_rewards:raises"))
            send_good("hung", reward_spec=spec("own_rewards:hangs"))
            send_good("unknown", reward_spec=spec("own_rewards:nothing"))
            send_good("aborted", status=TrajectoryStatus.ABORTED, reason="engine")
            big = a_trajectory("big", group="big")
            value, headers = check_in(
                TRAJECTORY.encode(big),
                trajectory_headers(big),
                name="payloads/big",
                store=BlobStore(config.store_uri),
                inline_max=16,
            )
            send("big", value, headers)
            send_good("last")

            letters = take(config.kafka, topics.name(DEADLETTERS), len(BAD_RECORDS))
            scores = take(config.kafka, topics.name(SCORES), 9)
            samples = take(config.kafka, topics.name(SAMPLES, "policy"), 9)
            wait_until_committed(config.kafka, topics, sent["last"].offset + 1)
            assert worker.stop() == 0

    by_offset = {read_dead_letter(r.headers).offset: r for r in letters}
    for name, (value, headers, reason) in BAD_RECORDS.items():
        record = by_offset[sent[name].offset]
        letter = read_dead_letter(record.headers)
        assert (letter.stage, letter.topic, letter.partition) == ("verify", topics.name(TRAJECTORIES), 0)
        assert letter.reason == reason, name
        assert (record.key, record.value) == (b"\xffk", value or value), name
        assert original_headers(record.headers) == headers, name

    found = {s.rollout_id: s for s in (SCORE.decode(r.value, r.headers) for r in scores)}
    assert {n: (s.status, s.reward, s.reason) for n, s in found.items()} == {
        "right": (ScoreStatus.SCORED, 1.0, None),
        "wrong": (ScoreStatus.SCORED, 0.0, None),
        "own": (ScoreStatus.SCORED, 0.5, None),
        "raised": (ScoreStatus.VOID, None, "reward_raised"),
        "hung": (ScoreStatus.VOID, None, "reward_timeout"),
        "unknown": (ScoreStatus.VOID, None, "reward_unknown"),
        "aborted": (ScoreStatus.VOID, None, "aborted"),
        "big": (ScoreStatus.SCORED, 1.0, None),
        "last": (ScoreStatus.SCORED, 1.0, None),
    }
    assert json.loads(found["own"].components or "") == {"length": 3.0}
    for name, score in found.items():
        assert score.ref == Ref(0, sent[name].offset)
    trace = [v for r in scores if r.key == b"right" for k, v in r.headers if k == "traceparent"]
    assert trace == [b"00-ab-cd-01"]

    fates = {s.rollout_id: (s.fate, s.reason) for s in map(decode_sample, samples)}
    voids = {"raised", "hung", "unknown", "aborted"}
    assert fates == {
        name: (Fate.DROPPED, "void") if name in voids else (Fate.ADMITTED, None) for name in found
    }


def decode_sample(record: Any) -> Sample:
    return SAMPLE.decode(record.value, record.headers)


def wait_until_committed(kafka: Any, topics: Topics, offset: int, timeout_s: float = 20.0) -> None:
    """The worker's committed offset of trajectories-0 reaches `offset`."""
    from kafka import TopicPartition

    until = time.monotonic() + timeout_s
    tp = TopicPartition(topics.name(TRAJECTORIES), 0)
    with closing(make_consumer(kafka, client_id="test", group_id=topics.group("streams"))) as consumer:
        while consumer.committed(tp) != offset:
            assert time.monotonic() < until, f"committed {consumer.committed(tp)}, wanted {offset}"
            time.sleep(0.1)


def test_groups_close_by_the_clock_and_late_members_are_told(
    broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    with (
        closing(make_producer(config.kafka, client_id="test")) as producer,
        streams_worker(config, tmp_path) as worker,
    ):

        def send(name: str, deadline_ms: int, answer: str, policy: str = "policy") -> None:
            t = a_trajectory(
                name, group="g", size=4, answer=answer, group_deadline_ms=deadline_ms, policy_id=policy
            )
            producer.send(
                topics.name(TRAJECTORIES),
                key=name.encode(),
                value=TRAJECTORY.encode(t),
                headers=trajectory_headers(t),
            ).get(10)

        deadline_ms = int(time.time() * 1000) + 12_000
        for name, answer in (("a", "85$"), ("b", "84$"), ("c", "84$")):
            send(name, deadline_ms, answer)
        first = take(config.kafka, topics.name(SAMPLES, "policy"), 3)
        assert time.time() * 1000 > deadline_ms + 1000
        send("d", deadline_ms, "85$")
        *_, late = take(config.kafka, topics.name(SAMPLES, "policy"), 4)
        assert worker.stop() == 0

    found = {s.rollout_id: s for s in map(decode_sample, first)}
    assert {n: s.advantage for n, s in found.items()} == pytest.approx({"a": 1.0, "b": -0.5, "c": -0.5})
    assert (decode_sample(late).rollout_id, decode_sample(late).reason) == ("d", "late")


def test_a_policy_that_nobody_knew_gets_its_topic(broker: Broker, namespace: str, tmp_path: Path) -> None:
    config = config_for(broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    with (
        closing(make_producer(config.kafka, client_id="test")) as producer,
        streams_worker(config, tmp_path) as worker,
    ):
        for name, policy in (("a", "other"), ("b", "no/name"), ("c", "policy")):
            t = a_trajectory(name, group=name, policy_id=policy)
            producer.send(
                topics.name(TRAJECTORIES), key=b"k", value=TRAJECTORY.encode(t), headers=trajectory_headers(t)
            ).get(10)
        (known,) = take(config.kafka, topics.name(SAMPLES, "policy"), 1)
        (unknown,) = take(config.kafka, topics.name(SAMPLES, "other"), 1)
        (letter,) = take(config.kafka, topics.name(DEADLETTERS), 1)
        assert worker.stop() == 0
    assert decode_sample(known).rollout_id == "c"
    assert decode_sample(unknown).rollout_id == "a"
    assert read_dead_letter(letter.headers).reason == "policy_id"
    assert read_dead_letter(letter.headers).topic == topics.name(SCORES)


def test_a_restart_with_an_open_group_sends_it_whole_and_nothing_twice_by_id(
    broker: Broker, namespace: str, tmp_path: Path
) -> None:
    config = config_for(broker.config, namespace, tmp_path)
    topics = Topics(namespace)
    with closing(make_producer(config.kafka, client_id="test")) as producer:

        def send(*names: str) -> None:
            for name in names:
                t = a_trajectory(name, group=name[0], size=3, answer=f"8{name[1]}$")
                producer.send(
                    topics.name(TRAJECTORIES),
                    key=name.encode(),
                    value=TRAJECTORY.encode(t),
                    headers=trajectory_headers(t),
                ).get(10)

        with streams_worker(config, tmp_path) as worker:
            send("a4", "a5", "a6", "b4", "b5")
            take(config.kafka, topics.name(SAMPLES, "policy"), 3)
            take(config.kafka, topics.name(SCORES), 5)
            worker.kill()
        with streams_worker(config, tmp_path):
            send("b6")
            found: dict[str, Sample] = {}
            for record in records_of(config.kafka, topics.name(SAMPLES, "policy"), timeout_s=60):
                sample = decode_sample(record)
                if sample.trajectory_id in found:
                    assert sample.advantage == found[sample.trajectory_id].advantage
                found.setdefault(sample.trajectory_id, sample)
                if len(found) == 6:
                    break
    assert {n.split(".")[0]: s.group_valid for n, s in found.items()} == dict.fromkeys(
        ["a4", "a5", "a6", "b4", "b5", "b6"], 3
    )
    assert all(s.fate is Fate.ADMITTED for s in found.values())
