"""A user's reward functions in a few host processes (host.py), each confined; one that misbehaves is killed.

A call that passes its limit takes its host with it. The others that ran there are called again, alone in a host
once they have been through a crash, so that the one at fault is known. Rewards must bear to be called twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ...schemas.config import VerifyConfig
from ...schemas.errors import RewardError
from .. import metrics
from ..sandbox.layers import Policy
from .base import RewardResult, RolloutView, result_of
from .load import LoadedReward
from .scratch import Scratch

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
"""For a host to start, and again to import a reward's module."""
MAX_LINE = 1 << 20
MAX_REASON = 100
ALONE = 4
"""Calls at once that are made again, each alone in a host."""


class HostPool:
    """Calls rewards in `hosts` processes, at most `concurrency` at once over all."""

    def __init__(
        self,
        *,
        concurrency: int,
        timeout_s: float,
        hosts: int,
        limits: Mapping[str, Any],
        require: bool,
        start_s: float = START_SECONDS,
    ) -> None:
        """`limits`: fields of Policy but the folder. With `require`, nothing runs where a layer is missing."""
        self._timeout_s, self._start_s = timeout_s, start_s
        self._limits, self._require = dict(limits), require
        self._each = max(1, concurrency // hosts)
        self._hosts: list[_Host | None] = [None] * min(hosts, concurrency)
        self._starting = [asyncio.Lock() for _ in self._hosts]
        self._room = asyncio.Semaphore(concurrency)
        self._alone = asyncio.Semaphore(ALONE)
        self._spare: list[_Host] = []
        """Hosts for calls that are made alone, in no call at this moment."""
        self._scratch = Scratch()
        self._living: list[_Host] = []
        """Processes that have not ended yet, killed ones too."""
        self.running = 0

    async def run(self, reward: LoadedReward, view: RolloutView) -> RewardResult:
        """Call a user's own reward. Raises RewardError with the reason."""
        async with self._room:
            self.running += 1
            started = time.perf_counter()
            try:
                return await self._tried(reward, view)
            finally:
                self.running -= 1
                metrics.reward_seconds.observe(time.perf_counter() - started)

    def close(self) -> None:
        """Kill the hosts."""
        for host in self._living:
            host.kill()
        self._scratch.close()

    async def aclose(self) -> None:
        """Kill the hosts and wait until they have ended."""
        self.close()
        await asyncio.gather(*(host.ended() for host in self._living))

    async def _tried(self, reward: LoadedReward, view: RolloutView) -> RewardResult:
        request = {"name": reward.name, "init": reward.init, "view": _fields(view)}
        host = await self._least_busy()
        try:
            alone, before = not host.pending, host.calls
            return await host.call(request, self._timeout_s, self._start_s)
        except RewardError as e:
            # Whoever came in meanwhile may have broken the host as well.
            own = alone and host.calls == before + 1
            if e.reason != "host_lost" and (e.reason not in ("reward_memory", "reward_crashed") or own):
                raise
        async with self._alone:
            spare = [host for host in self._spare if not host.lost]
            self._spare = spare[1:]
            host = spare[0] if spare else await self._started()
            try:
                return await host.call(request, self._timeout_s, self._start_s)
            finally:
                self._spare.append(host)

    async def _least_busy(self) -> _Host:
        def load(index: int) -> int:
            host = self._hosts[index]
            return len(host.pending) if host is not None and not host.lost else 0

        index = min(range(len(self._hosts)), key=load)
        async with self._starting[index]:
            host = self._hosts[index]
            if host is None or host.lost:
                host = self._hosts[index] = await self._started()
            return host

    async def _started(self) -> _Host:
        try:
            host = await asyncio.wait_for(
                _Host.start(self._scratch.folder(), self._limits, self._each), self._start_s
            )
        except (OSError, ValueError, TimeoutError) as e:
            raise RewardError("sandbox_unavailable", f"a reward host did not start: {e!r}") from e
        self._living = [*(h for h in self._living if not h.has_ended), host]
        if host.missing:
            logger.warning("the sandbox of rewards lacks %s", "; ".join(host.missing))
            if self._require:
                host.kill()
                raise RewardError("sandbox_unavailable", "; ".join(host.missing))
        return host


def host_pool(config: VerifyConfig) -> HostPool:
    """The pool that the verify section describes."""
    return HostPool(
        concurrency=config.concurrency,
        timeout_s=config.timeout_seconds,
        hosts=config.hosts,
        limits={"memory_mb": config.memory_mb, **{what: True for what in config.allow}},
        require=config.sandbox == "require",
    )


class _Host:
    """One process and the calls in it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: str, missing: list[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._folder, self.missing = process, folder, missing
        self._in, self._out = process.stdin, process.stdout
        self.pending: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self.lost = False
        self.calls = 0
        """How many have begun."""
        self._known: set[tuple[str, str]] = set()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, folder: str, limits: Mapping[str, Any], concurrency: int) -> _Host:
        """A host that is ready. OSError or ValueError where it does not come up."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace.streams.rewards.host"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            # An arena of address space for each thread would use up the limit.
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
            limit=MAX_LINE,
        )
        assert process.stdin is not None and process.stdout is not None
        policy = asdict(Policy(folder, **limits))
        hello = {"path": _path(), "policy": policy, "concurrency": concurrency}
        try:
            process.stdin.write(json.dumps(hello).encode() + b"\n")
            missing = json.loads(await process.stdout.readline())["missing"]
        except BaseException:
            _end(process, folder)
            raise
        return cls(process, folder, missing)

    async def call(self, request: Mapping[str, Any], timeout_s: float, start_s: float) -> RewardResult:
        """One call. RewardError: the reward's own reason, reward_timeout, reward_crashed, or host_lost by another."""
        number = secrets.randbits(62)  # no reward can answer for another by guessing
        key = (request["name"], json.dumps(request["init"], sort_keys=True))
        loading = key not in self._known
        limit = start_s if loading else timeout_s
        answers = self.pending[number] = asyncio.Queue()
        self.calls += 1
        try:
            self._in.write(json.dumps({"id": number, "tell": loading, **request}).encode() + b"\n")
            answer = await asyncio.wait_for(answers.get(), limit)
            if "loaded" in answer:
                self._known.add(key)
                limit = timeout_s
                answer = await asyncio.wait_for(answers.get(), limit)
        except TimeoutError:
            self.pending.pop(number, None)
            self.kill()
            raise RewardError("reward_timeout", f"{request['name']} took over {limit} s") from None
        finally:
            self.pending.pop(number, None)
        if "error" in answer:
            if answer["error"] == "reward_memory":
                self.kill("host_lost")
            raise RewardError(str(answer["error"])[:MAX_REASON], str(answer.get("detail")))
        return checked_reply(answer)

    def kill(self, reason: str = "host_lost") -> None:
        """End the process and every call in it."""
        if self.lost:
            return
        self.lost = True
        self._in.close()
        _end(self._process, self._folder)
        for answers in self.pending.values():
            answers.put_nowait({"error": reason, "detail": "the reward's host process ended"})
        if asyncio.current_task() is not self._reader:
            self._reader.cancel()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.returncode is not None

    async def ended(self) -> None:
        """Wait for the process, after `kill`."""
        await self._process.wait()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        # A broken line is a broken host.
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
            while line := await self._out.readline():
                answer = json.loads(line)
                if (answers := self.pending.get(answer["id"])) is not None:
                    answers.put_nowait(answer)
        self.kill("reward_crashed")


def checked_reply(answer: Mapping[str, Any]) -> RewardResult:
    """The host's word is not taken for it: a reward may have written on its pipe."""
    try:
        failed, turns = answer["failed"], answer["turns"]
        if failed is not None:
            return RewardResult.failure(str(failed)[:MAX_REASON])
        return result_of(RewardResult(answer["value"], dict(answer["components"]), turns))
    except (KeyError, TypeError, ValueError, OverflowError) as e:
        raise RewardError("reward_crashed", f"a broken reply of the host: {e!r}") from e


def _end(process: asyncio.subprocess.Process, folder: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _path() -> list[str]:
    return [os.path.abspath(p) for p in sys.path]


def _fields(view: RolloutView) -> dict[str, Any]:
    return {
        "task_id": view.task_id,
        "rollout_id": view.rollout_id,
        "messages": [(m.role, m.content) for m in view.messages],
        "args": dict(view.args),
        "metadata": dict(view.metadata),
        "status": view.status,
        "stop_reason": view.stop_reason,
    }
