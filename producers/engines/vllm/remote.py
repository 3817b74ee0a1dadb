"""A vLLM server that somebody else started, over its HTTP endpoints.

It must share a file system with us (updates are handed over as files) and have been started with our extension:
COMMAND below. Its control endpoints ask for no key: keep them on a private address.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import aiohttp

from ....schemas.errors import ConfigError, EngineError
from ..protocol import GenerateRequest
from .local import BACKEND, EXTENSION
from .transport import Facts, Finished, Sampled, facts_of, spans_of

COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model DIRECTORY --enable-scale-out "
    f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION} "
    f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'"""
)
CONNECT_SECONDS = 5.0
_ID = "generate-tokens-"
"""What the server puts before a request's own id."""


class RemoteVllm:
    """The server at `url`."""

    exact_counts = False  # at a pause, tokens may be on their way through the connection

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        """`api_key`: the server's --api-key."""
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._lost = False

    async def start(self) -> Facts:
        """Connect. ConfigError where the server was started without what updates need."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        try:
            await self._post("/init_weight_transfer_engine", init_info={})
            hello = await self.rpc("headrace_hello")
        except EngineError as e:
            raise ConfigError(
                f"the vLLM at {self.url} cannot be driven ({e}); start it with: {COMMAND}"
            ) from None
        return facts_of(hello)

    @property
    def alive(self) -> bool:
        """False once the server no longer answers, or its engine has died."""
        return self._session is not None and not self._lost

    async def generate(
        self, key: str, request: GenerateRequest, max_tokens: int, salt: str, sampled: Sampled
    ) -> Finished:
        """Sample; cancelling closes the connection, which aborts."""
        body = {
            "request_id": key,
            "token_ids": list(request.token_ids),
            "cache_salt": salt,
            "stream": True,
            "sampling_params": {
                "max_tokens": max_tokens,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k,
                "stop_token_ids": list(request.stop_token_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        async with self._answer("POST", "/inference/v1/generate", body) as response:
            async for choice in _choices(response):
                tokens = choice.get("token_ids") or []
                content = (choice.get("logprobs") or {}).get("content") or []
                sampled(tokens, [item["logprob"] for item in content])
                if choice.get("finish_reason") is not None:
                    spans = choice.get("weight_versions") or []
                    labels = [(s["version"], s["start"], s["end"]) for s in spans]
                    return Finished(choice["finish_reason"], spans_of(labels))
        raise EngineError(f"the vLLM at {self.url} ended an answer half way")

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests early."""
        await self._post("/inference/v1/abort_requests", request_ids=[_ID + key for key in keys])

    async def pause(self, mode: Literal["keep", "abort", "wait"]) -> None:
        """Stop sampling; keeps all caches."""
        await self._post(f"/pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        """Go on."""
        await self._post("/resume")

    async def prefill_again(self) -> None:
        """Forget all keys and values."""
        # There is no answer to /reset_prefix_cache that tells whether it did; a second pause has one.
        await self._post("/pause?mode=keep&clear_cache=true")

    async def rpc(self, method: str, *args: str) -> list[dict[str, Any]]:
        """A method of the worker extension on every rank."""
        return (await self._post("/collective_rpc", method=method, args=list(args)))["results"]

    async def write(self, version: int) -> None:
        """Have every rank write a staged update."""
        await self._post("/start_weight_update")
        await self._post("/update_weights", update_info={"version": version})
        await self._post("/finish_weight_update")

    async def label(self, version: int) -> None:
        """Only the label."""
        await self._post("/update_weight_version", new_version=str(version))

    async def close(self) -> None:
        """Disconnect; the server goes on. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, path: str, **body: Any) -> Any:
        async with self._answer("POST", path, body) as response:
            text = await response.text()
        try:
            return json.loads(text) if text else {}
        except ValueError:
            raise EngineError(f"{self.url}{path} answered something else than JSON: {text[:200]!r}") from None

    def _answer(self, method: str, path: str, body: dict[str, Any]) -> _Answer:
        if self._session is None:
            raise EngineError("the engine is closed")
        return _Answer(self, method, path, body)


class _Answer:
    """A response whose failure is an EngineError that names the server and what it said."""

    def __init__(self, remote: RemoteVllm, method: str, path: str, body: dict[str, Any]) -> None:
        self._remote, self._path = remote, path
        assert remote._session is not None
        self._request = remote._session.request(method, remote.url + path, json=body)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response = await self._request.__aenter__()
            if response.status >= 400:
                said = (await response.text())[:400]
                raise EngineError(f"{self._path} answered {response.status}: {said}")
        except (aiohttp.ClientConnectionError, TimeoutError) as e:
            self._remote._lost = True
            raise EngineError(f"the vLLM at {self._remote.url} does not answer: {e!r}") from None
        return response

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)
        if isinstance(error[1], aiohttp.ClientError):
            self._remote._lost = True
            raise EngineError(f"the vLLM at {self._remote.url} broke off: {error[1]!r}") from None


async def _choices(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Of a stream of server-sent events; a server's error in it is raised."""
    async for line in response.content:
        text = line.strip()
        if not text.startswith(b"data:") or text == b"data: [DONE]":
            continue
        event = json.loads(text[5:])
        if "error" in event:
            raise EngineError(f"vLLM: {event['error']}")
        for choice in event["choices"]:
            yield choice
