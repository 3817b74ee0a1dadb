"""One turn while it is sampled: its choices, their events, and everyone who waits for them.

A request that repeats one in flight follows the same turn. When the last follower has gone, the engines are told to
stop within the same step of the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from ..engines.protocol import GenerateRequest
from .answer import Answer, Called, Done, Event, Reasoning, Text, Usage
from .errors import RequestError, busy
from .listening import Listener, listen_to
from .messages import Message
from .sampler import Sampled, Sampler

logger = logging.getLogger(__name__)


class Turn:
    """The choices of one plan."""

    def __init__(
        self,
        requests: Sequence[GenerateRequest],
        listeners: Sequence[Listener],
        *,
        ended: Callable[[Turn], None],
    ) -> None:
        """One request and one listener for each choice. `ended` is called once, before followers hear of the end."""
        self.prompt_tokens = len(requests[0].token_ids) if requests else 0
        self.answers = [Answer() for _ in requests]
        self.sampled = [Sampled(r.request_id) for r in requests]
        self.aborted = False
        """Nobody waits for it any more."""
        self.error: RequestError | None = None
        self.done = False
        self._requests, self._listeners = requests, listeners
        self._replayed: Usage | None = None
        self._ended = ended
        self._events: list[Event] = []
        self._followers = 0
        self._news: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def replayed(cls, said: Iterable[tuple[Message, str]], usage: Usage) -> Turn:
        """An answer that was given before: (message, finish reason) of each choice."""
        turn = cls((), (), ended=lambda _: None)
        turn._replayed, turn.done = usage, True
        for i, (message, reason) in enumerate(said):
            answer = Answer()
            for event in _events_of(i, message, reason):
                answer.add(event)
                turn._events.append(event)
            turn.answers.append(answer)
        return turn

    @property
    def usage(self) -> Usage:
        """Of all choices so far."""
        if self._replayed is not None:
            return self._replayed
        return Usage(
            prompt=self.prompt_tokens,
            completion=sum(len(s.token_ids) for s in self.sampled),
            reasoning=sum(x.reasoning_tokens for x in self._listeners),
        )

    @property
    def version(self) -> int | None:
        """The newest policy version among the tokens so far."""
        return max((s.spans[-1].version for s in self.sampled if s.spans), default=None)

    def start(self, sampler: Sampler, prefer: str | None) -> None:
        """Begin to sample; `prefer`: the engine that holds the prefix."""
        self._task = asyncio.get_running_loop().create_task(self._run(sampler, prefer))

    async def follow(self, beat: float | None = None) -> AsyncGenerator[list[Event], None]:
        """Events as they come, all from the first on, in batches. Raises RequestError.

        `beat`: seconds after which an empty batch tells that nothing has come.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._news.add(news)
        self._followers += 1
        at = 0
        try:
            while True:
                if at < len(self._events):
                    batch, at = self._events[at:], len(self._events)
                    yield batch
                elif self.done:
                    if self.error is not None:
                        raise self.error
                    if self.aborted:  # its last follower left just before this one came
                        raise busy("the request that this one repeats was cut off; send it again")
                    return
                else:
                    news.clear()
                    timer = None if beat is None else loop.call_later(beat, news.set)
                    try:
                        await news.wait()
                    finally:
                        if timer is not None:
                            timer.cancel()
                    if at == len(self._events) and not self.done:
                        yield []
        finally:
            self._news.discard(news)
            self._followers -= 1
            if not self._followers and not self.done and self._task is not None:
                self.aborted = True
                self._task.cancel()

    async def _run(self, sampler: Sampler, prefer: str | None) -> None:
        try:
            if len(self._requests) == 1:
                await self._choice(0, sampler, prefer)
            else:
                await _all(self._choice(i, sampler, prefer) for i in range(len(self._requests)))
        except RequestError as e:
            self.error = e
        except asyncio.CancelledError:
            self.aborted = True
        except Exception:
            logger.exception("a turn broke")
            self.error = RequestError("the gateway failed; its log says why", status=500)
        finally:
            self._ended(self)
            self.done = True
            self._tell()

    async def _choice(self, i: int, sampler: Sampler, prefer: str | None) -> None:
        listener, sampled, answer = self._listeners[i], self.sampled[i], self.answers[i]
        async with aclosing(sampler.stream(self._requests[i], prefer)) as found:
            async for engine_id, piece in found:
                sampled.engine_id = engine_id
                taken, events = listen_to(listener, piece.token_ids, piece.logprobs)
                sampled.add(piece, taken)
                stopped = listener.stop_text is not None
                if stopped or piece.finish_reason is not None:
                    sampled.finish_reason = "stop" if stopped else piece.finish_reason or "stop"
                    events += listener.end(sampled.finish_reason)
                for event in events:
                    answer.add(event)
                self._events += events
                if events:
                    self._tell()
                if stopped:
                    return

    def _tell(self) -> None:
        for news in self._news:
            news.set()


async def _all(coroutines: Iterable[Any]) -> None:
    """Wait for all; the first failure ends the others."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _events_of(index: int, message: Message, reason: str) -> list[Event]:
    events: list[Event] = []
    if message.reasoning is not None:
        events.append(Reasoning(index=index, text=message.reasoning))
    if message.text:
        events.append(Text(index=index, text=message.text))
    events += [Called(index=index, call=call) for call in message.tool_calls]
    return [*events, Done(index=index, finish_reason=reason)]
