"""A user's rewards in confined host processes: each way to misbehave has its own reason and harms no other call."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.schemas.errors import RewardError
from headrace.streams.rewards.base import Message, RewardResult, RolloutView, result_of
from headrace.streams.rewards.load import load_reward
from headrace.streams.rewards.pool import HostPool, checked_reply
from headrace.streams.rewards.scratch import Scratch
from headrace.streams.sandbox.layers import probe

HOSTILE = """
import asyncio, os, socket, subprocess, sys, time
from headrace.streams.rewards.base import RewardResult
def good(r): return {"reward": 0.5, "length": len(r.answer)}
async def good_async(r):
    await asyncio.sleep(0)
    return {"turns": [0.25, 0.5]}
def failed(r): return RewardResult.failure("by_rule")
def hangs(r):
    while True: time.sleep(1)
async def blocks(r): time.sleep(1000)
def raises(r): raise KeyError("x")
def allocates(r):
    kept = []
    while True: kept.append(bytearray(64 << 20))
def forks(r):
    for _ in range(3): os.fork()
def runs(r):
    try: subprocess.run(["true"])
    except OSError: pass
    return 1.0
def connects(r): socket.create_connection(("127.0.0.1", 9))
def swallows(r):
    try: socket.socket()
    except OSError: pass
    return 1.0
def writes(r): open(r.args["path"], "w").write("x")
def writes_inside(r):
    with open("note", "w") as f: f.write("x")
    return float(os.path.getsize("note"))
def waits(r):
    while not os.path.exists(r.args["path"]): time.sleep(0.01)
    return 1.0
def names_itself(r): return os.getpid()
def nan(r): return float("nan")
def text(r): return "1.0"
def huge(r): return "x" * (8 << 20)
def huge_parts(r): return {"reward": 1.0, **{f"part{i}": 1.0 for i in range(50_000)}}
def deep(r): return deep(r)
def leaves(r): sys.exit(0)
async def leaves_async(r): sys.exit(0)
def dies(r): os._exit(0)
def forges(r):
    reply = b'{"id": %d, "value": NaN, "components": {}, "turns": null, "failed": null}\\n'
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                os.write(fd, b"".join(reply % n for n in range(8)))
        except OSError: pass
    time.sleep(1)
    return 1.0
def babbles(r):
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"): os.write(fd, b"[1]\\n")
        except OSError: pass
    return 1.0
def closes(r):
    os.closerange(3, 100)
    return 1.0
def prints(r):
    print('{"id": 0, "value": 9}')
    return 1.0
"""

REASONS = {
    "hangs": "reward_timeout",
    "blocks": "reward_timeout",
    "raises": "reward_raised",
    "allocates": "reward_memory",
    "forks": "reward_processes",
    "runs": "reward_processes",
    "connects": "reward_network",
    "swallows": "reward_network",
    "writes": "reward_write",
    "nan": "reward_not_finite",
    "text": "reward_not_number",
    "huge": "reward_not_number",
    "huge_parts": "reward_too_large",
    "deep": "reward_raised",
    "leaves": "reward_raised",
    "leaves_async": "reward_raised",
    "dies": "reward_crashed",
    "closes": "reward_crashed",
    "babbles": "reward_crashed",
}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with reward functions of every kind."""
    (tmp_path / "hostile_rewards.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile_rewards", raising=False)
    return "hostile_rewards"


def run(
    module: str, *names: str, path: str = "", timeout_s: float = 30.0, **limits: Any
) -> list[RewardResult | str]:
    """The result or the reason of each call, all made at once after one that warms up both hosts."""
    view = RolloutView(
        task_id="t", rollout_id="r", messages=(Message("assistant", "hey"),), args={"path": path}
    )

    async def call(pool: HostPool, name: str) -> RewardResult | str:
        try:
            return await pool.run(load_reward(f"{module}:{name}"), view)
        except RewardError as e:
            return e.reason

    async def all_of_them() -> list[RewardResult | str]:
        pool = HostPool(
            concurrency=8,
            timeout_s=timeout_s,
            start_s=60.0,
            hosts=2,
            limits={"memory_mb": 1024, **limits},
            require=False,
        )
        try:
            await asyncio.gather(*(call(pool, "good") for _ in range(4)))
            return list(await asyncio.gather(*(call(pool, name) for name in names)))
        finally:
            await pool.aclose()

    return asyncio.run(all_of_them())


def test_results_come_back_whole(hostile: str) -> None:
    assert run(hostile, "good", "good_async", "failed", "writes_inside", "prints", "forges") == [
        RewardResult(0.5, {"length": 3.0}),
        RewardResult(0.75, {}, (0.25, 0.5)),
        RewardResult.failure("by_rule"),
        RewardResult(1.0),
        RewardResult(1.0),
        RewardResult(1.0),
    ]


@pytest.mark.parametrize(("name", "reason"), REASONS.items())
def test_each_fault_has_its_reason_and_harms_no_other_call(
    hostile: str, tmp_path: Path, name: str, reason: str
) -> None:
    outside = tmp_path / "outside"
    fine = RewardResult(0.5, {"length": 3.0})
    limit = 2.0 if reason == "reward_timeout" else 30.0
    found = run(hostile, "good", name, "good", "good", path=str(outside), timeout_s=limit)
    assert found == [fine, reason, fine, fine]
    assert not outside.exists()


def test_a_call_that_began_alone_is_not_blamed_for_one_that_came_later(hostile: str, tmp_path: Path) -> None:
    view = RolloutView(task_id="t", rollout_id="r", messages=(), args={"path": str(tmp_path / "go")})

    async def body() -> RewardResult:
        pool = HostPool(
            concurrency=8, timeout_s=30.0, start_s=60.0, hosts=1, limits={"memory_mb": 1024}, require=False
        )
        try:
            await pool.run(load_reward(f"{hostile}:prints"), view)
            first = asyncio.create_task(pool.run(load_reward(f"{hostile}:waits"), view))
            await asyncio.sleep(0)
            assert pool._hosts[0] is not None and len(pool._hosts[0].pending) == 1
            with pytest.raises(RewardError, match="reward_crashed"):
                await pool.run(load_reward(f"{hostile}:dies"), view)
            (tmp_path / "go").touch()
            return await first
        finally:
            await pool.aclose()

    assert asyncio.run(body()) == RewardResult(1.0)


WORKER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from headrace.streams.rewards.base import Message, RolloutView
from headrace.streams.rewards.load import load_reward
from headrace.streams.rewards.pool import HostPool, checked_reply
async def main():
    pool = HostPool(concurrency=2, timeout_s=600, hosts=2, limits={"memory_mb": 1024}, require=False)
    view = RolloutView(task_id="t", rollout_id="r", messages=())
    calls = [pool.run(load_reward(f"hostile_rewards:{n}"), view) for n in ("names_itself", "names_itself")]
    print(*[int((await call).value) for call in calls], flush=True)
    await pool.run(load_reward("hostile_rewards:hangs"), view)
asyncio.run(main())
"""


def test_a_worker_killed_with_no_warning_leaves_no_process_and_its_folders_are_swept(
    hostile: str, tmp_path: Path
) -> None:
    places = tmp_path / "temporary"
    places.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(places)},
    ) as worker:
        assert worker.stdout is not None
        hosts = {int(pid) for pid in worker.stdout.readline().split()}
        assert hosts and all(psutil.pid_exists(pid) for pid in hosts)
        assert len(list(places.iterdir())) == 1
        Scratch(places).close()
        assert len(list(places.iterdir())) == 1, "swept although its worker lives"
        worker.kill()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in hosts if psutil.pid_exists(pid)], timeout=30)
    assert not alive
    Scratch(places).close()
    assert not list(places.iterdir())


def test_a_root_that_was_tidied_away_is_made_anew(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path)
    shutil.rmtree(Path(scratch.folder()).parent)
    assert Path(scratch.folder()).is_dir()
    scratch.close()
    assert not list(tmp_path.iterdir())


def test_what_is_granted_is_not_refused(hostile: str) -> None:
    assert run(hostile, "swallows", "runs", network=True, processes=True) == [RewardResult(1.0)] * 2


def test_the_probe_tells_what_is_missing_in_words() -> None:
    assert all(isinstance(line, str) for line in probe())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"value": float("nan")}, "reward_not_finite"),
        ({"value": "1"}, "reward_not_number"),
        ({"value": 1.0, "components": {"a": float("inf")}}, "reward_not_finite"),
        ({"value": 1.0, "components": 3}, "reward_crashed"),
        ({"value": 10**400}, "reward_crashed"),
        ({}, "reward_crashed"),
    ],
)
def test_a_reply_of_a_host_is_checked_again(fields: dict[str, Any], reason: str) -> None:
    whole = {"components": {}, "turns": None, "failed": None, **fields}
    with pytest.raises(RewardError) as caught:
        checked_reply(whole)
    assert caught.value.reason == reason


@pytest.mark.parametrize("turns", ["12", 3, [1.0, "x"], [float("inf")]])
def test_rewards_per_turn_are_checked(turns: Any) -> None:
    with pytest.raises(RewardError, match="reward_not_"):
        result_of({"turns": turns})
