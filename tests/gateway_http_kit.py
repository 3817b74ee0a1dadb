"""For tests of the gateway's HTTP side: engines that say what a test has written, and a gateway on a real port."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import anthropic
import httpx
import openai
from gateway_kit import END, ids, tokenizer

from headrace.producers.engines.protocol import GenerateRequest, GenerateResult, VersionSpan
from headrace.producers.engines.server import HttpServer, bind, url_of
from headrace.producers.gateway.app import GatewayApp
from headrace.producers.gateway.chatml import ChatMLRenderer
from headrace.producers.gateway.gateway import Gateway, make_sessions
from headrace.producers.gateway.keys import KeyRing
from headrace.producers.gateway.limits import Limits
from headrace.producers.gateway.model import ChatModel
from headrace.producers.gateway.models import Models
from headrace.producers.gateway.outcomes import Outcomes
from headrace.producers.gateway.renderer_text import TextEncoder
from headrace.producers.gateway.rollouts import Rollouts
from headrace.producers.gateway.sampler import Piece, Sampler
from headrace.producers.rollout.engine_pool import EnginePool
from headrace.schemas.engine import EngineState, EngineStatus
from headrace.schemas.errors import EngineError
from headrace.schemas.feedback import Feedback
from headrace.schemas.trajectory import Trajectory


class Bytes:
    """A Vocabulary on the small tokenizer."""

    def __init__(self, without: Sequence[str] = ()) -> None:
        """`without`: control tokens that it does not know."""
        added = tokenizer().get_added_tokens_decoder()
        self.control = {t.content: i for i, t in added.items() if t.content not in without}

    def decode(self, ids: Sequence[int]) -> str:
        return tokenizer().decode(list(ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """Control tokens are what they spell."""
        return tokenizer().encode(text, add_special_tokens=False).ids


HTTP = httpx.Client(timeout=10, verify=False)
"""One for all tests: making a client takes longer than a request."""
Say = Callable[[GenerateRequest], Sequence[int]]


class Speaker:
    """An engine that samples what `say` returns; one token a piece, `before` awaited before each."""

    def __init__(self, say: Say, *, streams: bool = True) -> None:
        self.say = say
        self.asked: list[GenerateRequest] = []
        self.answered: list[list[int]] = []
        self.running = 0
        self.aborted = 0
        self.version = 3
        self.before: Callable[[int], Any] | None = None
        self.failing = 0
        """Calls that fail before anything is sampled."""
        self.lost_logprobs = 0
        if streams:
            self.stream = self._stream

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[Piece]:
        self.asked.append(request)
        self.running += 1
        done = False
        try:
            if self.failing:
                self.failing -= 1
                done = True
                raise EngineError("scripted")
            said = list(self.say(request))[: request.max_tokens]
            self.answered.append(said)
            for i, token in enumerate(said):
                if self.before is not None:
                    await self.before(i)
                last = i + 1 == len(said)
                reason = None if not last else "stop" if token in request.stop_token_ids else "length"
                lost = last and self.lost_logprobs
                if last:
                    done = True
                yield Piece(
                    token_ids=(token,),
                    logprobs=() if lost else (-0.25,),
                    version_spans=(VersionSpan(self.version, 0, 1),),
                    finish_reason=reason,
                )
        finally:
            self.running -= 1
            self.aborted += not done

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        pieces = [p async for p in self._stream(request)]
        n = len(pieces)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=tuple(p.token_ids[0] for p in pieces),
            logprobs=tuple(x for p in pieces for x in p.logprobs),
            version_spans=(VersionSpan(self.version, 0, n),),
            finish_reason=pieces[-1].finish_reason or "stop",
        )

    async def close(self) -> None:
        return


def in_turn(*texts: str) -> Say:
    """Each answer once, in order; then the last again."""
    left = list(texts)

    def say(request: GenerateRequest) -> list[int]:
        return [*ids(left.pop(0) if len(left) > 1 else left[0]), END]

    return say


class Running:
    """A gateway on a free port of 127.0.0.1, in a thread of its own."""

    def __init__(
        self,
        *engines: Speaker,
        keys: KeyRing | None = None,
        limits: Limits | None = None,
        keepalive: float = 5.0,
        patience: float = 0.3,
        patterns: Sequence[str] = ("gpt-*", "claude-*"),
        refuse: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.engines = engines
        self.published: list[Trajectory] = []
        self.feedback: list[Feedback] = []
        self.counts: list[tuple[str, int]] = []
        self.loop = asyncio.new_event_loop()
        self._settings = (keys or KeyRing(), limits or Limits(), keepalive, patience, patterns, refuse)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> Running:
        self._socket = bind("127.0.0.1", 0)
        self.url = url_of(self._socket)
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def call(self, function: Callable[[], Any]) -> Any:
        """On the gateway's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        keys, limits, keepalive, patience, patterns, refuse = self._settings
        self.pool = pool = EnginePool("policy", lambda url: self.engines[int(url.rsplit("-", 1)[1])])
        for i in range(len(self.engines)):
            pool.update(status(i))
        text = TextEncoder(tokenizer())
        model = ChatModel(ChatMLRenderer(tokenizer()), text)
        rollouts = Rollouts(make_sessions(model, "policy"), refuse=refuse)
        sampler = Sampler(pool, patience=patience, pause=0.02)
        self.gateway = gateway = Gateway(model, sampler, rollouts, self._publish, limits=limits)
        outcomes = Outcomes(gateway, self._feedback)
        app = GatewayApp(
            gateway,
            keys,
            Models("policy", patterns),
            outcomes,
            keepalive=keepalive,
            count=lambda api, code: self.counts.append((api, code)),
        )
        self.asgi = app.app
        self._server = HttpServer(app.app)
        self.loop.call_soon(self._started.set)
        await self._server.serve(sockets=[self._socket])

    async def _publish(self, trajectories: list[Trajectory]) -> None:
        self.published += trajectories

    async def _feedback(self, feedback: Feedback) -> None:
        self.feedback.append(feedback)


def status(i: int = 0, *, version: int = 3, state: EngineState = EngineState.IDLE) -> EngineStatus:
    return EngineStatus(
        engine_id=f"engine-{i}",
        policy_id="policy",
        state=state,
        version=version,
        at_ms=0,
        url=f"engine-{i}",
    )


@functools.cache
def _shared() -> Running:
    """One gateway for all tests that need no settings of their own: starting one takes half a second."""
    gateway = Running(Speaker(in_turn("")))
    gateway.__enter__()
    atexit.register(gateway.__exit__)
    return gateway


@contextlib.contextmanager
def running(*texts: str, **settings: Any) -> Iterator[tuple[Running, Speaker]]:
    """A gateway with one engine that says `texts` in turn."""
    if settings:
        with Running(Speaker(in_turn(*texts)), **settings) as found:
            yield found, found.engines[0]
        return
    gateway = _shared()
    for kept in (gateway.published, gateway.feedback, gateway.counts):
        kept.clear()
    gateway.engines[0].__init__(in_turn(*texts))  # type: ignore[misc]
    yield gateway, gateway.engines[0]


@functools.cache
def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    """Without retries."""
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=10)


@functools.cache
def anthropic_client(url: str) -> anthropic.Anthropic:
    """Without retries."""
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=10)
