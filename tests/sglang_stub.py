"""A stand-in for an SGLang server: the HTTP interface, scheduler rules and weights that headrace relies on, no model.

Written from SGLang's public sources of its main branch, autumn 2026 (0.5.x: srt/entrypoints/http_server.py,
srt/managers/io_struct.py, tokenizer_manager.py, scheduler.py, scheduler_components/weight_updater.py), and issue
33783. What it keeps of them: generate waits while paused; `in_place` keeps requests and cache, `retract` queues them
again without theirs, `abort` ends them before it answers; an update with flush_cache and requests around ends the
scheduler; a load that fails goes back to the directory of the last good one; /update_weight_version aborts by default;
prompts stay in a radix cache under their extra_key. Tokens and log-probabilities are a function of the weights' hash
and of a chain that stands for the keys and values, so that stale ones show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import uvicorn
import xxhash
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headrace.producers.engines.sglang import SglangEngine
from headrace.producers.engines.sglang_checkpoint import Checkpoint
from headrace.producers.engines.sglang_control import ServerControl
from headrace.producers.engines.sglang_http import Keys, ServerConnection
from headrace.schemas.weight_hash import set_hash

Weights = dict[str, np.ndarray]


def extend(chain: int, token: int, weights: int) -> int:
    """The keys and values of a sequence after one more token went through `weights` (a hash)."""
    return xxhash.xxh3_64_intdigest(np.array([chain, token, weights], dtype=np.uint64).tobytes())


def sample(chain: int, vocab_size: int) -> tuple[int, float]:
    """The token, and its log-probability, that follow a sequence."""
    digest = xxhash.xxh3_64_intdigest(np.array([chain, 1], dtype=np.uint64).tobytes())
    return digest % vocab_size, -((digest >> 32) % 4096 + 1) / 1024


def recomputed(prompt, tokens, weights: int, vocab_size: int) -> list[tuple[int, float]]:
    """What one forward pass under `weights` gives at each position of `tokens`."""
    chain, found = 0, []
    for position, token in enumerate([*prompt, *tokens][:-1]):
        chain = extend(chain, token, weights)
        if position >= len(prompt) - 1:
            found.append(sample(chain, vocab_size))
    return found


@dataclass(eq=False)
class _Request:
    body: dict[str, Any]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    output: list[tuple[float, int, None]] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)
    chain: int | None = None
    cached: int = 0
    to_finish: dict[str, Any] | None = None
    finish: dict[str, Any] | None = None
    cut: bool = False

    @property
    def context(self) -> list[int]:
        return [*self.body["input_ids"], *(token for _, token, _ in self.output)]


class SglangStub:
    """Serves in a thread of its own from `start` until `stop`."""

    def __init__(
        self,
        weights: Weights,
        *,
        vocab_size: int,
        spans: bool = True,
        incremental: bool = False,
        radix: bool = True,
        api_key: str | None = None,
        admin_key: str | None = None,
        old_paths: bool = False,
        step_seconds: float = 0.001,
        stream_interval: int = 8,
    ) -> None:
        """`spans`: answers have weight_versions. `incremental`: a stream's chunks hold what is new only.

        `stream_interval`: a chunk for the first token, then one for so many.
        """
        self.launch = {name: bits.copy() for name, bits in weights.items()}
        self.vocab_size, self.spans, self.incremental, self.radix = vocab_size, spans, incremental, radix
        self.api_key, self.admin_key, self.step_seconds = api_key, admin_key, step_seconds
        self.stream_interval = stream_interval
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.sampled = self.cached = 0
        self.budget: int | None = None
        """`sampled` stops here; requests that are to end still do."""
        self.faults: defaultdict[str, deque[str]] = defaultdict(deque)
        self.dead = False
        self._begin()
        names = ("/get_model_info", "/get_server_info") if old_paths else ("/model_info", "/server_info")
        routes = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._rename,
            "/get_weights_by_name": self._by_name,
        }
        self.app = Starlette(
            routes=[
                *(
                    Route(path, self._guarded(path, handler), methods=["POST"])
                    for path, handler in routes.items()
                ),
                Route(names[0], self._guarded(names[0], self._model_info)),
                Route(names[1], self._guarded(names[1], self._server_info)),
            ]
        )

    def start(self) -> SglangStub:
        config = uvicorn.Config(
            self.app,
            host="127.0.0.1",
            port=0,
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        host, port = self._server.servers[0].sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._server.should_exit = True
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def hash(self) -> int:
        """Of the live weights."""
        return set_hash(self.weights)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]

    def restart(self) -> None:
        """As a supervisor does after a crash: connections cut, the weights it was launched with."""
        done = threading.Event()

        def again() -> None:
            self._drop()
            self._begin()
            self.dead = False
            done.set()

        self._loop.call_soon_threadsafe(again)
        assert done.wait(10)

    # The process

    def _begin(self) -> None:
        self.weights = {name: bits.copy() for name, bits in self.launch.items()}
        self._live = self.hash
        self.version = "default"
        self.path: str | None = None
        self.held = self.engine_paused = False
        self.waiting: list[_Request] = []
        self.batch: list[_Request] = []
        self.requests: dict[str, _Request] = {}
        self.cache: dict[tuple[str | None, tuple[int, ...]], int] = {}

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._condition, self._stopping = asyncio.Condition(), asyncio.Event()
        stepping = asyncio.create_task(self._schedule())
        serving = asyncio.create_task(self._server.serve())
        while not self._server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.005)
        ready.set()
        await serving
        stepping.cancel()

    def _guarded(self, path: str, handler: Any) -> Any:
        async def run(request: Request) -> Response:
            keys = {self.api_key} if path == "/generate" else {self.admin_key or self.api_key}
            if keys != {None} and request.headers.get("authorization") not in {f"Bearer {k}" for k in keys}:
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            body = json.loads(await request.body() or b"{}")
            self.calls.append((path, body))
            if self.dead:
                return _Cut()
            fault = self.faults[path].popleft() if self.faults[path] else ""
            if fault == "500":
                return JSONResponse({"error": {"message": "scheduler said no"}}, status_code=500)
            if fault == "hang":
                await self._stopping.wait()
            if fault == "503":
                return JSONResponse({"error": {"message": "not ready"}}, status_code=503)
            answer = await handler(body, fault) if path != "/generate" else await handler(body, request)
            return _Cut() if fault == "cut" or self.dead else answer

        return run

    # The tokenizer manager

    async def _generate(self, body: dict[str, Any], request: Request) -> Response:
        async with self._condition:
            await self._condition.wait_for(lambda: not self.held)
        if any(not 0 <= t < self.vocab_size for t in body["input_ids"]):
            return JSONResponse({"error": {"message": "token id out of range"}}, status_code=400)
        entry = self.requests[body["rid"]] = _Request(body)
        self.waiting.append(entry)
        if body.get("stream"):
            return StreamingResponse(self._chunks(entry), media_type="text/event-stream")
        watch = asyncio.create_task(self._abort_when_gone(request, entry))
        try:
            while entry.finish is None and not entry.cut:
                entry.changed.clear()
                await entry.changed.wait()
        finally:
            watch.cancel()
        return _Cut() if entry.cut else JSONResponse(self._message(entry, 0))

    async def _chunks(self, entry: _Request) -> Any:
        sent = 0
        try:
            while True:
                entry.changed.clear()
                if entry.cut:
                    raise ConnectionResetError("the server is gone")
                if len(entry.output) > sent or entry.finish is not None:
                    message = self._message(entry, sent if self.incremental else 0)
                    sent = len(entry.output)
                    yield b"data: " + json.dumps(message).encode() + b"\n\n"
                    if entry.finish is not None:
                        yield b"data: [DONE]\n\n"
                        return
                await entry.changed.wait()
        finally:
            self._end(entry, {"type": "abort", "message": "client is gone"})

    async def _abort_when_gone(self, request: Request, entry: _Request) -> None:
        while not await request.is_disconnected():  # noqa: ASYNC110  (as SGLang does)
            await asyncio.sleep(0.05)
        self._end(entry, {"type": "abort", "message": "client is gone"})

    def _message(self, entry: _Request, start: int) -> dict[str, Any]:
        count = len(entry.output)
        meta: dict[str, Any] = {
            "id": entry.body["rid"],
            "finish_reason": entry.finish,
            "prompt_tokens": len(entry.body["input_ids"]),
            "completion_tokens": count,
            "cached_tokens": entry.cached,
            "weight_version": self.version,
            "output_token_logprobs": entry.output[start:],
            "output_token_logprobs_length": count,
        }
        if self.spans and entry.finish is not None:
            spans, at = [], 0
            for version, end in [*entry.marks, (self.version, count)]:
                if end > at:
                    spans.append({"version": version, "start": at, "end": end})
                    at = end
            meta["weight_versions"] = spans
        return {"text": "", "output_ids": [t for _, t, _ in entry.output[start:]], "meta_info": meta}

    async def _pause(self, body: dict[str, Any], fault: str) -> Response:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return JSONResponse({"error": {"message": f"Invalid mode: {mode!r}"}}, status_code=400)
        self.held = True
        if mode == "abort":
            while self.requests:
                self._abort_some("")
                await asyncio.sleep(0.002)
        else:
            self.engine_paused = True
            if mode == "retract":
                for entry in self.batch:
                    entry.chain = None
                self.waiting, self.batch = self.batch + self.waiting, []
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, body: dict[str, Any], fault: str) -> Response:
        async with self._condition:
            self.held = self.engine_paused = False
            self._condition.notify_all()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, body: dict[str, Any], fault: str) -> Response:
        self._abort_some("" if body.get("abort_all") else body.get("rid") or "no such")
        return Response()

    async def _update(self, body: dict[str, Any], fault: str) -> Response:
        while not self.held and self.requests:  # noqa: ASYNC110  (the writer's lock)
            await asyncio.sleep(0.002)
        if body.get("abort_all_requests", False):
            self._abort_some("")
        success, message = self._load(body, fault)
        if success and body.get("flush_cache", True):
            if self.batch or self.waiting:
                self.dead = True  # assert flush_cache_success, "Cache flush failed after updating weights"
                self._drop()
            self.cache.clear()
        if success and body.get("weight_version") is not None:
            self._record(body["weight_version"])
        if fault == "half":
            return JSONResponse({"error": {"message": "out of memory"}}, status_code=500)
        answer = {"success": success, "message": message, "num_paused_requests": 0}
        return JSONResponse(answer, status_code=200 if success else 400)

    def _load(self, body: dict[str, Any], fault: str) -> tuple[bool, str]:
        try:
            files = sorted(Path(body["model_path"]).glob("*.safetensors"))
            loaded = [t for f in files for t in safetensors.deserialize(f.read_bytes())]
            if not files:
                return False, f"Failed to get weights iterator: no weights in {body['model_path']}."
        except (OSError, safetensors.SafetensorError) as e:
            return False, f"Failed to get weights iterator: {e}."
        if fault == "lie":
            return True, "Succeeded to update model weights."
        for index, (name, tensor) in enumerate(loaded):
            if name not in self.weights or list(self.weights[name].shape) != list(tensor["shape"]):
                if self.path is not None:
                    self._load({"model_path": self.path}, "")
                else:
                    self.weights = {n: bits.copy() for n, bits in self.launch.items()}
                return False, f"Failed to update weights: {name}.\nRolling back to original weights."
            if fault == "half" and index >= len(loaded) // 2:
                self._live = self.hash
                return False, "out of memory"
            self.weights[name][...] = np.frombuffer(tensor["data"], np.uint16).reshape(tensor["shape"])
        self._live = self.hash
        self.path = body["model_path"]
        return True, "Succeeded to update model weights."

    async def _rename(self, body: dict[str, Any], fault: str) -> Response:
        if body.get("abort_all_requests", True):
            self._abort_some("")
        self._record(body["new_version"])
        return JSONResponse({"success": True, "message": "", "new_version": self.version})

    async def _by_name(self, body: dict[str, Any], fault: str) -> Response:
        bits = self.weights.get(body["name"])
        if bits is None or fault == "unreadable":
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, status_code=400)
        rows = bits[: body.get("truncate_size", 100)]
        values = (rows.astype(np.uint32) << 16).view(np.float32)
        return Response(json.dumps(values.tolist()).replace("NaN", "null"), media_type="application/json")

    async def _model_info(self, body: dict[str, Any], fault: str) -> Response:
        return JSONResponse({"model_path": self.path or "launch", "weight_version": self.version})

    async def _server_info(self, body: dict[str, Any], fault: str) -> Response:
        facts = {"version": "0.5.99", "disable_radix_cache": not self.radix, "context_length": None}
        return JSONResponse(facts)

    # The scheduler

    async def _schedule(self) -> None:
        while True:
            await asyncio.sleep(self.step_seconds)
            if self.engine_paused or self.dead:
                continue
            for entry in self.waiting:
                self._prefill(entry)
            self.batch, self.waiting = self.batch + self.waiting, []
            for entry in list(self.batch):
                if self.budget is None or self.sampled < self.budget or entry.to_finish is not None:
                    self._decode(entry)

    def _prefill(self, entry: _Request) -> None:
        context, key = entry.context[:-1], entry.body.get("extra_key")
        done = len(context)
        while done and not (self.radix and (key, tuple(context[:done])) in self.cache):
            done -= 1
        entry.cached = done
        self.cached += done
        chain = self.cache[key, tuple(context[:done])] if done else 0
        for n in range(done, len(context)):
            chain = extend(chain, context[n], self._live)
            if n < len(entry.body["input_ids"]):
                self.cache[key, tuple(context[: n + 1])] = chain
        entry.chain = chain

    def _decode(self, entry: _Request) -> None:
        assert entry.chain is not None and not self.engine_paused
        entry.chain = extend(entry.chain, entry.context[-1], self._live)
        token, logprob = sample(entry.chain, self.vocab_size)
        entry.output.append((logprob, token, None))
        self.sampled += 1
        parameters = entry.body["sampling_params"]
        if entry.to_finish is not None:
            self._end(entry, entry.to_finish)
        elif token in parameters["stop_token_ids"] and not parameters.get("ignore_eos"):
            self._end(entry, {"type": "stop", "matched": token})
        elif len(entry.output) >= parameters["max_new_tokens"]:
            self._end(entry, {"type": "length", "length": len(entry.output)})
        elif len(entry.output) == 1 or len(entry.output) % self.stream_interval == 0:
            entry.changed.set()

    def _record(self, version: str) -> None:
        if version != self.version:
            for entry in self.requests.values():
                entry.marks.append((self.version, len(entry.output)))
        self.version = version

    def _abort_some(self, prefix: str) -> None:
        for rid, entry in list(self.requests.items()):
            if rid.startswith(prefix):
                reason = {"type": "abort", "message": "Aborted by AbortReq."}
                if entry in self.waiting:
                    self._end(entry, reason)
                else:  # one more step, then it is finished like any other
                    entry.to_finish = reason

    def _end(self, entry: _Request, reason: dict[str, Any]) -> None:
        if entry.finish is None:
            entry.finish = reason
        for queue in (self.waiting, self.batch):
            with contextlib.suppress(ValueError):
                queue.remove(entry)
        self.requests.pop(entry.body["rid"], None)
        entry.changed.set()

    def _drop(self) -> None:
        for entry in list(self.requests.values()):
            entry.cut = True
            entry.changed.set()
        self.requests.clear()


class _Cut(Response):
    """An answer that promises more than comes: the connection breaks in the middle."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"1000"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ConnectionResetError("the server is gone")


def engine_on(
    stub: SglangStub, directory: Path, *, keys: Keys | None = None, load_seconds: float = 10, **more: Any
) -> SglangEngine:
    """An engine for `stub`, whose weights' directory is `directory`."""
    connection = ServerConnection(stub.url, keys)
    control = ServerControl(connection, seconds=10, load_seconds=load_seconds)
    settings = {
        "vocab_size": stub.vocab_size,
        "context": 1024,
        "stream": True,
        "watch_seconds": 3600.0,
        **more,
    }
    return SglangEngine(connection, control, Checkpoint(directory), **settings)
