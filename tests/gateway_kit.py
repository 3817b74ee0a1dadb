"""A small ChatML vocabulary and engines that say what a test wants, for tests of the gateway's core."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.producers.engines.protocol import GenerateResult, VersionSpan
from headrace.producers.gateway.capture import Plan, Sampled, Session
from headrace.producers.gateway.chatml import ChatMLRenderer
from headrace.producers.gateway.messages import Call, Message, Role, ToolCall
from headrace.producers.gateway.rows import Rollout
from headrace.producers.gateway.tree import Node, Thinking

MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
MERGES = [("h", "i"), ("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hi")]
"""Few, so that what merges across a boundary is easy to see: `hi`, two newlines, `hello`."""


@cache
def tokenizer() -> Tokenizer:
    """All bytes, the merges above, and the control tokens; `<think>` and the tool markers not marked as special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in MERGES)])}
    built = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(list(MARKERS[:3]))
    built.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS[3:]])
    return built


START, END, EOT, THINK, THOUGHT, CALL, CALLED, RESPONSE, RESPONDED = (
    tokenizer().token_to_id(t) for t in MARKERS
)


def ids(text: str) -> list[int]:
    """As a tokenizer reads `text`, control tokens included."""
    return tokenizer().encode(text, add_special_tokens=False).ids


def text(values: Sequence[int]) -> str:
    """The text of ids, control tokens spelled out."""
    return tokenizer().decode(list(values), skip_special_tokens=False)


def session(thinking: Thinking = Thinking.KEEP, rollout_id: str = "r") -> Session:
    """A rollout on the small vocabulary."""
    return Session(
        Rollout(rollout_id=rollout_id, policy_id="p"), ChatMLRenderer(tokenizer()), thinking=thinking
    )


def user(text: str) -> Message:
    return Message(role=Role.USER, text=text)


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, text=text)


def tool(text: str, call_id: str = "") -> Message:
    return Message(role=Role.TOOL, text=text, tool_call_id=call_id)


def said(
    text: str = "", *calls: ToolCall, reasoning: str | None = None, handle: str | None = None
) -> Message:
    return Message(role=Role.ASSISTANT, text=text, tool_calls=calls, reasoning=reasoning, handle=handle)


def wants(name: str, arguments: str, call_id: str = "c1") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def call(*messages: Message, **fields: object) -> Call:
    return Call(model="m", messages=messages, **fields)  # type: ignore[arg-type]


def result(sampled: Sequence[int], *, version: int = 0, finish: str | None = None) -> GenerateResult:
    """An engine's answer: logprobs -0.5, -1.0, -1.5 ... so that each is recognised."""
    return GenerateResult(
        request_id="q",
        token_ids=tuple(sampled),
        logprobs=tuple(-(i + 1) / 2 for i in range(len(sampled))),
        version_spans=(VersionSpan(version, 0, len(sampled)),),
        finish_reason=finish or ("stop" if sampled and sampled[-1] == END else "length"),
    )


def answer(s: Session, plan: Plan, sampled: Sequence[int], message: Message, **fields: object) -> Node:
    """The engine samples `sampled`, and the client is sent `message`."""
    delivered = bool(fields.pop("delivered", True))
    turn = Sampled(result=result(sampled, **fields), answer=message)  # type: ignore[arg-type]
    return s.commit(plan, [turn], delivered=delivered)[0]
