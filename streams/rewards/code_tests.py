"""`python_tests`: runs the Python code of the last answer, then tests, in a confined process (code_child.py).

The code shares its process with the tests: one that means to can find and forge their result. Tests that must stand
against that belong in an environment's own container.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import signal
import sys
import weakref
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ...schemas.errors import RewardError
from ..sandbox.layers import Policy
from .args import Args, last_block, parsed
from .base import RewardResult, RolloutView
from .scratch import Scratch

START_SECONDS = 60.0
MAX_LINE = 1 << 20


class PythonTestsArgs(Args):
    """Of `python_tests`."""

    tests: Annotated[list[str], Field(min_length=1, max_length=1000)]
    """Python, each run after the code, in its namespace; one that raises (`assert`) has not passed."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """For the code and all tests, of wall time and of CPU time."""
    partial: Literal["all", "fraction"] = "all"
    """1.0 when all pass, else 0.0; or the fraction that passes."""
    memory_mb: Annotated[int, Field(ge=128)] = 1024
    sandbox: Literal["require", "prefer"] = "require"
    """prefer: run even where this machine lacks a layer of the sandbox."""

    @field_validator("tests")
    @classmethod
    def _are_python(cls, tests: list[str]) -> list[str]:
        for number, test in enumerate(tests):
            try:
                compile(test, f"tests[{number}]", "exec")
            except (SyntaxError, ValueError) as e:
                raise ValueError(f"tests[{number}] is no Python: {e}") from None
        return tests


async def python_tests(rollout: RolloutView) -> RewardResult:
    """The tests' result, with components `passed` and `tests`. Failed: no_code, code_raised, code_timeout, code_died.

    The code is the last closed block fenced as `python` (or as nothing). RewardError `sandbox_unavailable`.
    """
    args = parsed(PythonTestsArgs, rollout.args)
    code = last_block(rollout.answer, "python")
    if code is None:
        return RewardResult.failure("no_code")
    async with _room():
        answer = await _run(args, code)
    if "failed" in answer:
        return RewardResult.failure(str(answer["failed"])[:40])
    passed, count = min(int(answer["passed"]), len(args.tests)), len(args.tests)
    value = passed / count if args.partial == "fraction" else float(passed == count)
    return RewardResult(value, {"passed": float(passed), "tests": float(count)})


async def _run(args: PythonTestsArgs, code: str) -> dict[str, Any]:
    """What the child said last, or {"failed": why} where it died of the code."""
    scratch = _scratch()
    folder = scratch.folder()
    policy = Policy(folder, args.memory_mb, cpu_seconds=int(args.timeout_seconds) + 1, file_mb=16, files=64)
    process = await _started(folder)
    assert process.stdin is not None and process.stdout is not None
    try:
        await _ready(process, policy, args)
        task = {"code": code, "tests": args.tests}
        process.stdin.write(json.dumps(task).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), args.timeout_seconds)
        except TimeoutError:
            return {"failed": "code_timeout"}
        except ValueError:
            return {"failed": "code_died"}
        if not line:
            died = await asyncio.wait_for(process.wait(), START_SECONDS)
            return {"failed": "code_timeout" if died == -signal.SIGXCPU else "code_died"}
        return _reply(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        scratch.remove(folder)


async def _started(folder: str) -> asyncio.subprocess.Process:
    own = {"PYTHONPATH": _path(), "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-B", "-m", "headrace.streams.rewards.code_child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath, "MALLOC_ARENA_MAX": "2", **own, "OPENBLAS_NUM_THREADS": "1"},
            limit=MAX_LINE,
        )
    except OSError as e:
        raise RewardError("sandbox_unavailable", f"no process for the code: {e}") from e


def _path() -> str:
    return os.pathsep.join(os.path.abspath(p) for p in sys.path)


async def _ready(process: asyncio.subprocess.Process, policy: Policy, args: PythonTestsArgs) -> None:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(asdict(policy)).encode() + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        missing = json.loads(line)["missing"]
    except (OSError, ValueError, KeyError, TimeoutError) as e:
        raise RewardError("sandbox_unavailable", f"the process for the code did not start: {e!r}") from e
    if missing and args.sandbox == "require":
        raise RewardError("sandbox_unavailable", "; ".join(missing))


def _reply(line: bytes) -> dict[str, Any]:
    """The child's word; the code may have written on its pipe."""
    try:
        answer = json.loads(line)
        return (
            {"failed": str(answer["failed"])}
            if "failed" in answer
            else {"passed": max(0, int(answer["passed"]))}
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return {"failed": "code_died"}


_rooms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
_scratches: list[Scratch] = []


def _room() -> asyncio.Semaphore:
    """As many at once as there are processors: the limit is of wall time too."""
    loop = asyncio.get_running_loop()
    if loop not in _rooms:
        _rooms[loop] = asyncio.Semaphore(os.cpu_count() or 1)
    return _rooms[loop]


def _scratch() -> Scratch:
    if not _scratches:
        _scratches.append(Scratch())
        atexit.register(_scratches[0].close)
    return _scratches[0]
