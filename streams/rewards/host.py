"""A reward host: a confined process that calls a user's reward functions, several at once, for one worker.

Lines of JSON on the pipes that were its stdin and stdout; what a reward prints goes to stderr. First the path and the
policy, answered by what the sandbox lacks; then calls {id, name, init, view, tell}, answered in any order by {id, loaded}
where `tell`, then {id, value, components, turns, failed} or {id, error, detail}. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from ...schemas.errors import ConfigError, RewardError
from ..sandbox.layers import Policy, apply
from .base import Message, RewardResult, RolloutView, result_of
from .load import LoadedReward, load_reward

MAX_REPLY = 256 * 1024
_attempt: contextvars.ContextVar[list[tuple[str, str]] | None] = contextvars.ContextVar(
    "attempt", default=None
)
"""What the call in progress tried and may not: (reason, detail), even where it swallowed the error."""


def main() -> None:
    """Serve until the input ends."""
    requests, replies = _private_pipes()
    start = json.loads(requests.readline())
    policy = Policy(**start["policy"])
    os.chdir(policy.folder)
    sys.path[:] = start["path"]
    sys.dont_write_bytecode = True
    missing = apply(policy)
    sys.addaudithook(_Watch(policy))
    lock = threading.Lock()

    def reply(answer: dict[str, Any]) -> None:
        line = json.dumps(answer).encode()
        if len(line) > MAX_REPLY:
            line = json.dumps(
                {"id": answer["id"], "error": "reward_too_large", "detail": f"{len(line)} bytes"}
            ).encode()
        with lock:
            try:
                replies.write(line + b"\n")
                replies.flush()
            except (OSError, ValueError):  # a reward closed our pipe: the worker must see that
                os._exit(3)

    reply({"missing": missing})
    threading.stack_size(4 << 20)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    threads = ThreadPoolExecutor(start["concurrency"])
    for line in requests:
        request = json.loads(line)
        context = contextvars.copy_context()
        threads.submit(context.run, _serve, request, loop, reply)
    os._exit(0)


def _private_pipes() -> tuple[Any, Any]:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, replies


def _serve(request: Mapping[str, Any], loop: asyncio.AbstractEventLoop, reply: Any) -> None:
    attempts: list[tuple[str, str]] = []
    try:
        reward = _loaded(request["name"], json.dumps(request["init"], sort_keys=True))
        if request["tell"]:
            reply({"id": request["id"], "loaded": True})
        _attempt.set(attempts)
        answer = _as_json(_call(reward, _view(request["view"]), loop))
    except RewardError as e:
        answer = {"error": e.reason, "detail": e.detail}
    except ConfigError as e:
        answer = {"error": "reward_unknown", "detail": str(e)}
    except MemoryError:
        answer = {"error": "reward_memory", "detail": "over verify.memory_mb"}
    except BaseException as e:
        answer = {"error": "reward_raised", "detail": f"{type(e).__name__}: {e}"}
    _attempt.set(None)
    if attempts and answer.get("error") != "reward_memory":
        answer = dict(zip(("error", "detail"), attempts[0], strict=True))
    if "detail" in answer:
        answer["detail"] = str(answer["detail"])[:300]
    reply({"id": request["id"], **answer})


def _call(reward: LoadedReward, view: RolloutView, loop: asyncio.AbstractEventLoop) -> RewardResult:
    if reward.is_async:
        return result_of(asyncio.run_coroutine_threadsafe(_finish(reward.call(view)), loop).result())
    returned = reward.call(view)
    return result_of(asyncio.run(_finish(returned)) if inspect.isawaitable(returned) else returned)


async def _finish(awaitable: Any) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as e:  # would end the event loop
        raise RuntimeError(f"{type(e).__name__}: {e}") from e


@lru_cache(maxsize=1024)
def _loaded(name: str, init: str) -> LoadedReward:
    return load_reward(name, json.loads(init))


def _view(fields: Mapping[str, Any]) -> RolloutView:
    return RolloutView(**{**fields, "messages": tuple(Message(*m) for m in fields["messages"])})


def _as_json(result: RewardResult) -> dict[str, Any]:
    return {
        "value": result.value,
        "components": dict(result.components),
        "turns": result.turns,
        "failed": result.failed,
    }


class _Watch:
    """An audit hook that refuses what the policy does, and notes it for the call that tried."""

    _PROCESSES = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "subprocess.Popen")
    _WRITES = (
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.truncate",
        "os.link",
        "os.symlink",
        "os.chmod",
    )

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._folder = os.path.realpath(policy.folder) + os.sep

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        attempts = _attempt.get()
        if attempts is None:
            return
        reason = self._reason(event, args)
        if reason is not None:
            attempts.append((reason, event))
            raise PermissionError(f"{event}: refused by the reward's sandbox; see verify.allow")

    def _reason(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event in ("socket.connect", "socket.getaddrinfo", "socket.bind") and not self._policy.network:
            return "reward_network"
        if event == "socket.__new__" and not self._policy.network:
            return None if args[1] in (-1, socket.AF_UNIX) else "reward_network"  # a socket pair is harmless
        if event in self._PROCESSES and not self._policy.processes:
            return "reward_processes"
        if event == "open" and not self._policy.write:
            writes = isinstance(args[2], int) and args[2] & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            )
            return "reward_write" if writes and self._outside(args[0]) else None
        if event in self._WRITES and not self._policy.write:
            return "reward_write" if self._outside(args[0]) else None
        return None

    def _outside(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        text = os.path.realpath(os.fsdecode(path))
        return text != os.devnull and not (text + os.sep).startswith(self._folder)


if __name__ == "__main__":
    main()
