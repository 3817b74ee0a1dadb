"""The sandbox's layers: which system calls the filter refuses and lets pass, and its program for each machine."""

from __future__ import annotations

import asyncio
import errno
import platform
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_init import model_dir

from headrace.deploy.init import write_templates
from headrace.deploy.up import check
from headrace.schemas.config import VerifyConfig
from headrace.schemas.config_file import load_config
from headrace.schemas.errors import ConfigError, RewardError
from headrace.streams.rewards.base import RolloutView
from headrace.streams.rewards.load import load_reward
from headrace.streams.rewards.pool import host_pool
from headrace.streams.sandbox import seccomp

ALLOW = 0x7FFF0000
EPERM = 0x00050000 | errno.EPERM
KILL = 0x80000000
PID = 4242
GETPID = {"x86_64": 39, "aarch64": 172}
OPENAT = {"x86_64": 257, "aarch64": 56}
CLONE_THREAD = 0x00010000


def verdict(code: bytes, arch: int, number: int, first: int = 0) -> int:
    """What the filter returns for a call: its few instructions, interpreted (linux/bpf_common.h)."""
    data = struct.pack("=IIQ6Q", number, arch, 0, first, 0, 0, 0, 0, 0)
    program = list(struct.iter_unpack("=HBBI", code))
    at, accumulator = 0, 0
    while True:
        op, jt, jf, k = program[at]
        at += 1
        if op == 0x06:
            return int(k)
        if op == 0x20:
            accumulator = struct.unpack_from("=I", data, k)[0]
            continue
        holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
        at += jt if holds else jf


def program(arch: str, *, network: bool = False, processes: bool = False, modes: bool = False) -> bytes:
    return seccomp.build(arch, PID, network=network, processes=processes, modes=modes)


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_the_program_decides_each_call_as_told(arch: str) -> None:
    audit = seccomp.ARCHES[arch]
    code = program(arch)
    for number in (GETPID[arch], OPENAT[arch]):
        assert verdict(code, audit, number) == ALLOW
    for number in (
        *seccomp._NETWORK[arch],
        *seccomp._ALWAYS[arch],
        *seccomp._MODES[arch],
        *seccomp._FORKS[arch],
    ):
        assert verdict(code, audit, number) == EPERM, number
    assert verdict(code, audit, seccomp._CLONE[arch], CLONE_THREAD) == ALLOW
    assert verdict(code, audit, seccomp._CLONE[arch], 17) == EPERM
    assert verdict(code, audit, 435) == 0x00050000 | errno.ENOSYS
    for number in seccomp._SIGNALS[arch]:
        assert verdict(code, audit, number, PID) == ALLOW
        assert verdict(code, audit, number, PID + 1) == EPERM
    limits = seccomp._PRLIMIT[arch]
    assert [verdict(code, audit, limits, pid) for pid in (0, PID, PID + 1, 1)] == [ALLOW, ALLOW, EPERM, EPERM]


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_what_is_granted_passes_and_the_rest_stays_refused(arch: str) -> None:
    audit = seccomp.ARCHES[arch]
    open_to_all = program(arch, network=True, processes=True, modes=True)
    for number in (
        *seccomp._NETWORK[arch],
        *seccomp._MODES[arch],
        seccomp._CLONE[arch],
        *seccomp._FORKS[arch],
    ):
        assert verdict(open_to_all, audit, number) == ALLOW
    for number in seccomp._ALWAYS[arch]:
        assert verdict(open_to_all, audit, number) == EPERM


def test_another_machines_calls_end_the_process() -> None:
    assert verdict(program("x86_64"), 0x40000003, 1) == KILL  # 32-bit calls have other numbers
    assert verdict(program("x86_64"), seccomp.ARCHES["x86_64"], 0x40000000 + 41) == 0x00050000 | errno.ENOSYS


def test_with_require_up_stops_and_rewards_are_void_where_a_layer_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = VerifyConfig(sandbox="require", reward="calculator")
    pool = host_pool(config)

    async def lacking(*_: object) -> object:
        return types.SimpleNamespace(missing=["landlock: none"], kill=lambda: None, has_ended=True)

    monkeypatch.setattr("headrace.streams.rewards.pool._Host.start", lacking)
    view = RolloutView(task_id="t", rollout_id="r", messages=())
    with pytest.raises(RewardError, match="sandbox_unavailable: landlock"):
        asyncio.run(pool.run(load_reward("math:sqrt"), view))
    write_templates(tmp_path)
    model_dir(tmp_path)
    monkeypatch.setattr("headrace.deploy.up.probe", lambda: ["landlock: none"])
    with pytest.raises(ConfigError, match="this machine lacks landlock"):
        check(load_config(tmp_path / "headrace.toml", overrides={"verify.sandbox": "require"}), [tmp_path])


CHILD = """
import ctypes, os, socket, sys, tempfile, threading
from headrace.streams.sandbox.layers import Policy, apply
folder = tempfile.mkdtemp()
missing = apply(Policy(folder, memory_mb=1024))
if any(line.startswith("seccomp") for line in missing):
    sys.exit(77)
def refused(call, *args):
    try:
        call(*args)
    except PermissionError:
        return True
    return False
assert refused(os.fork) and refused(socket.socket) and refused(os.kill, os.getppid(), 0)
assert refused(os.chmod, folder, 0o777)
assert not refused(os.kill, os.getpid(), 0) and not refused(os.listdir, "/")
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.machine() not in seccomp.ARCHES, reason="no filter for this machine")
def test_the_kernel_takes_the_filter_and_threads_still_start() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 77:
        pytest.skip("this kernel or container takes no seccomp filter")
    assert done.returncode == 0, done.stderr
