"""Listens to one choice of a turn: sampled tokens -> the events that its client gets.

Text and reasoning pass as soon as no later token can change them; a tool call passes whole. A stop string ends the
turn at the token that completes it. White space next to a block is the template's, not the answer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from .answer import Called, Done, Event, Reasoning, Text, TokenLogprob
from .holding import Finder
from .messages import Call, ToolCall
from .spelling import Marks, Spelled, Speller, Vocabulary
from .toolparse import parse_call


class _In(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class Listener:
    """One choice."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        marks: Marks,
        call: Call,
        *,
        index: int,
        new_id: Callable[[], str],
        reasoning: bool = False,
    ) -> None:
        """`new_id`: ids for tool calls; `reasoning`: the prompt has opened the reasoning block already."""
        self._vocabulary = vocabulary
        self._index, self._new_id = index, new_id
        self._tools = {t.name: t for t in call.tools}
        self._plain = call.prompt is not None
        self._calls_wanted = call.tool_choice != "none" and not self._plain
        self._speller = Speller(vocabulary, marks)
        self._stops = Finder(call.sampling.stop)
        self._marks = Finder(() if self._plain else marks.as_text)
        self._state = _In.REASONING if reasoning and not self._plain else _In.TEXT
        self._body = ""
        self._space = ""
        """White space that belongs to the answer only if more of it comes."""
        self._begun = self._plain
        self._keep_tokens = call.logprobs
        self._tokens: list[TokenLogprob] = []
        self.stop_text: str | None = None
        """The stop string that has ended the turn."""
        self.reasoning_tokens = 0

    def feed(self, token: int, logprob: float) -> list[Event]:
        """The events after one more token; nothing may be fed after `stop_text` is set."""
        if self._state is _In.REASONING:
            self.reasoning_tokens += 1
        elif self._keep_tokens:
            self._tokens.append(TokenLogprob(self._vocabulary.decode([token]), logprob))
        events: list[Event] = []
        for spelled in self._speller.feed(token):
            self._hear(spelled, events)
            if self.stop_text is not None:
                break
        return events

    def end(self, finish_reason: str) -> list[Event]:
        """The last events. `finish_reason`: `stop` or `length`, the engine's word."""
        events: list[Event] = []
        if self.stop_text is None:
            for spelled in self._speller.end():
                self._hear(spelled, events)
            if self.stop_text is None:
                self._say(self._stops.rest(), events)
        self._take(self._marks.rest(), events)
        if self._state is _In.CALL:
            self._finish_call(events, whole=False)
        if self._space and self._state is _In.TEXT and not any(isinstance(e, Called) for e in events):
            self._emit(self._space, events)
        reason = "stop" if self.stop_text is not None else finish_reason
        tokens, self._tokens = tuple(self._tokens), []
        events.append(Done(index=self._index, finish_reason=reason, stop_text=self.stop_text, tokens=tokens))
        return events

    def _hear(self, spelled: Spelled, events: list[Event]) -> None:
        """Look for stop strings, and say what is sure to come before them."""
        sure, self.stop_text = self._stops.feed(spelled.text)
        if not spelled.mark or self._plain or self.stop_text is not None:
            self._say(sure, events)
            return
        before = (sure + self._stops.rest()).removesuffix(spelled.text)
        self._say(before, events)
        self._take(self._marks.rest(), events)
        self._mark(spelled.text, events)

    def _say(self, text: str, events: list[Event]) -> None:
        """Text, which may hold marks where the vocabulary has no tokens for them."""
        while text:
            sure, found = self._marks.feed(text)
            self._take(sure, events)
            if found is None:
                return
            self._mark(found, events)
            text = self._marks.rest()

    def _mark(self, mark: str, events: list[Event]) -> None:
        match mark, self._state:
            case "</tool_call>", _In.CALL:
                self._finish_call(events, whole=True)
            case _, _In.CALL:
                self._body += mark
            case "<think>", _In.TEXT:
                self._space, self._state, self._begun = "", _In.REASONING, False
            case "</think>", _In.REASONING:
                self._space, self._state, self._begun = "", _In.TEXT, False
            case "<tool_call>", _ if self._calls_wanted:
                # A call out of the middle of reasoning ends the reasoning: so do the engines' own parsers.
                self._state, self._body = _In.CALL, ""
            case "</think>", _In.TEXT:
                return
            case _:
                self._take(mark, events)

    def _take(self, text: str, events: list[Event]) -> None:
        if self._state is _In.CALL:
            self._body += text
            return
        if not self._begun:
            text = text.lstrip("\n")
            if not text:
                return
            self._begun = True
        if self._plain:
            if text:
                self._emit(text, events)
            return
        said = (self._space + text).rstrip()
        self._space = (self._space + text)[len(said) :]
        if said:
            self._emit(said, events)

    def _emit(self, text: str, events: list[Event]) -> None:
        if self._state is _In.REASONING:
            events.append(Reasoning(index=self._index, text=text))
            return
        tokens, self._tokens = tuple(self._tokens), []
        events.append(Text(index=self._index, text=text, tokens=tokens))

    def _finish_call(self, events: list[Event], *, whole: bool) -> None:
        body, self._body, self._state = self._body, "", _In.TEXT
        parsed = parse_call(body, self._tools)
        if parsed is not None:
            self._space, self._begun = "", False
            name, arguments = parsed
            events.append(Called(index=self._index, call=self._named(name, arguments)))
        else:  # the client sees what the model wrote
            self._begun = True
            self._take(f"<tool_call>{body}{'</tool_call>' if whole else ''}", events)

    def _named(self, name: str, arguments: str) -> ToolCall:
        tool = self._tools.get(name)
        namespace = tool.namespace if tool is not None else None
        return ToolCall(id=self._new_id(), name=name, arguments=arguments, namespace=namespace)


def listen_to(listener: Listener, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[int, list[Event]]:
    """Feed many tokens; how many were taken (fewer where a stop string came), and their events, neighbours joined."""
    events: list[Event] = []
    for taken, token in enumerate(ids, 1):
        for event in listener.feed(token, logprobs[taken - 1] if taken <= len(logprobs) else 0.0):
            _append(events, event)
        if listener.stop_text is not None:
            return taken, events
    return len(ids), events


def _append(events: list[Event], event: Event) -> None:
    match events[-1] if events else None, event:
        case Text() as last, Text():
            text, tokens = last.text + event.text, last.tokens + event.tokens
            events[-1] = Text(index=event.index, text=text, tokens=tokens)
        case Reasoning() as last, Reasoning():
            events[-1] = Reasoning(index=event.index, text=last.text + event.text)
        case _:
            events.append(event)
