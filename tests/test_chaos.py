"""The whole loop on three nodes of Apache Kafka while roles and nodes are killed -9: the books balance afterwards."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from conftest import NO_KAFKA

from headrace.deploy.bench.chaos import Trial, chaos

KILLS = int(os.environ.get("HEADRACE_CHAOS_KILLS", "50"))
SEED = int(os.environ.get("HEADRACE_CHAOS_SEED", "0")) or int(time.time())


@pytest.mark.chaos
@pytest.mark.kafka
@pytest.mark.timeout(1500)
def test_nothing_is_lost_or_trained_twice_whatever_is_killed(tmp_path: Path) -> None:
    home = os.environ.get("KAFKA_HOME")
    if not home:
        pytest.skip(NO_KAFKA)
    trial = Trial(run_dir=tmp_path / "run", seconds=600, kills=KILLS, seed=SEED, kafka_home=Path(home))
    found = chaos(trial, lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True))
    print(json.dumps(found, indent=1))
    assert not found["problems"], f"seed {SEED}: {found['problems']}"
    assert found["kills"] >= KILLS
    assert found["lost"] == found["trained_twice"] == found["version_gaps"] == found["hash_mismatches"] == 0
    assert found["in_flight"] == found["stuck_groups"] == found["leaked_processes"] == 0
    ends = ("trained", "dropped", "void", "deadlettered")
    assert found["acknowledged"] == sum(found[end] for end in ends)
    assert found["versions_redone"] == found["versions"] + 1 and found["trained"] > 0
