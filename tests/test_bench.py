"""headrace bench: the figures are made by the real parts, in a run small enough for every day."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.deploy.bench.decoding import decode_mb_s, sized
from headrace.deploy.bench.streams import Bench, Load
from headrace.deploy.broker.launcher import Broker
from headrace.schemas.trajectory import TRAJECTORY
from headrace.streams.kafka import closing, make_admin


def test_the_decoded_record_has_the_size_asked_for() -> None:
    assert abs(len(TRAJECTORY.encode(sized(16_384))) - 16_384) < 200
    found = decode_mb_s(calls=3)
    assert found["decode_mb_s"] > 0 and found["decode_us"] > 0


@pytest.mark.kafka
def test_samples_come_through_beside_a_pass_through_and_no_topic_is_left(
    kafka_broker: Broker, tmp_path: Path
) -> None:
    said: list[str] = []
    load = Load(records=400, partitions=2, rounds=1)
    found = Bench(kafka_broker.config, tmp_path, load, said.append).run(workers=1)
    assert found["samples_per_s"] > 0 and found["passthrough_per_s"] > 0
    assert found["ratio"] == pytest.approx(found["samples_per_s"] / found["passthrough_per_s"], abs=0.01)
    assert found["three_workers_per_s"] is None
    assert 0 < found["bound_ratio"] < 0.5, "two hops can never be faster than half of one"
    with closing(make_admin(kafka_broker.config)) as admin:
        assert not [name for name in admin.list_topics() if name.startswith("bench")]
