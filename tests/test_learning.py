"""The demo learns: each task from its start to its target. Minutes each; the seconds are printed, not judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.learn, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("task", ["calculator", "addition"])
def test_the_demo_learns(task: str, seed: int, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.deploy.cli",
        "demo",
        "--task",
        task,
        "--seed",
        str(seed),
        "--json",
    ]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(summary))
    assert summary["reward_start"] < 0.25
    assert summary["reward_end"] > 0.90
    assert 1 <= summary["lag_max"] <= 4
