"""The feedback join while its workers are killed, terminated and frozen: every rollout settles, with its outcome."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from storms import Storm, calm_until, lags, rage
from streams_workers import CODE, config_for
from test_feedback import WEIGHTS, inputs, scores_by_rollout, sender

from headrace.deploy.broker.launcher import Broker
from headrace.schemas.topics import Topics

STORM_SECONDS = 25.0
PER_SECOND = 30


@pytest.mark.storm
@pytest.mark.parametrize("seed", [7, 8] if "HEADRACE_STORM_SEEDS" in os.environ else [7])
def test_two_workers_in_a_storm_settle_every_rollout_with_its_outcome(
    kafka_broker: Broker, namespace: str, tmp_path: Path, seed: int
) -> None:
    config = config_for(
        kafka_broker.config, namespace, tmp_path, feedback=WEIGHTS | {"window_seconds": 600.0}
    )
    storm = Storm(config, tmp_path, CODE, random.Random(seed), count=2)
    order = random.Random(4)
    sent: dict[str, float] = {}
    with sender(config) as send:

        def some(count: int) -> None:
            for _ in range(count):
                name, value = f"r{len(sent)}", float(len(sent))
                steps = [
                    lambda name=name: send.trajectory(name, wait=False),
                    lambda name=name, value=value: send.outcome(name, value, wait=False),
                ]
                order.shuffle(steps)
                for step in steps:
                    step()
                sent[name] = value

        storm.start()
        try:
            rage(storm, some, per_second=PER_SECOND, seconds=STORM_SECONDS)
            group = Topics(namespace).group("streams")
            ended = calm_until(storm, lambda: not lags(config.kafka, group, inputs(config)), timeout_s=120.0)
            found = scores_by_rollout(config, len(sent), timeout_s=60.0)
        finally:
            storm.stop()
            print(dict(storm.events), len(sent))
            print(storm.logs())
    assert ended, "commits do not reach the end"
    missing = sorted(set(sent) - set(found))
    assert not missing, f"{len(missing)} of {len(sent)} missing, such as {missing[:5]}"
    assert {n: s.reward for n, s in found.items()} == sent
    assert storm.struck >= 3
