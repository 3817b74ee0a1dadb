"""The Messages API through Anthropic's SDK, and in the forms that Claude Code sends."""

import json

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from gateway_http_kit import HTTP, anthropic_client, running
from gateway_kit import ids, text
from pydantic import TypeAdapter

CALLS = (
    '<think>\nlook first\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at":"a"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "look", "arguments": {"at":"b"}}\n</tool_call>'
)
TOOLS = [
    {"name": "look", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search"},
]
HI = [{"role": "user", "content": "hi"}]
EVENT = TypeAdapter(RawMessageStreamEvent)


client = anthropic_client


def test_a_whole_message() -> None:
    with running(CALLS) as (gateway, speaker):
        raw = client(gateway.url).messages.with_raw_response.create(
            model="claude-x", max_tokens=400, messages=HI, tools=TOOLS, system="be kind"
        )
        answer = raw.parse()
        Message.model_validate(json.loads(raw.text()))
        assert [b.type for b in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert answer.content[2].input == {"at": "a"}
        assert answer.content[2].id != answer.content[3].id
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == len(ids(CALLS)) + 1
        assert "be kind" in text(speaker.asked[0].token_ids)


def test_a_stream_in_the_order_that_clients_need() -> None:
    with running(CALLS) as (gateway, _):
        body = {"model": "policy", "max_tokens": 400, "messages": HI, "tools": TOOLS, "stream": True}
        frames = HTTP.post(f"{gateway.url}/v1/messages?beta=true", json=body).text.split("\n\n")
        names = []
        for frame in filter(None, frames):
            name, data = frame.split("\n")
            tree = json.loads(data.removeprefix("data: "))
            assert name == f"event: {tree['type']}"
            if tree["type"] != "ping":
                EVENT.validate_python(tree)
            names.append(tree["type"])
        squeezed = [n for i, n in enumerate(names) if not i or names[i - 1] != n]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert squeezed == ["message_start", "ping", *(block * 4), "message_delta", "message_stop"]


def test_the_sdks_stream_helper_adds_up_to_the_same() -> None:
    with (
        running(CALLS) as (gateway, _),
        client(gateway.url).messages.stream(
            model="claude-x", max_tokens=400, messages=HI, tools=TOOLS
        ) as stream,
    ):
        answer = stream.get_final_message()
    assert [b.type for b in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking == "look first"
    assert answer.content[0].signature
    assert answer.content[3].input == {"at": "b"}
    assert answer.stop_reason == "tool_use"


def test_a_replay_with_moved_cache_marks_and_a_changing_billing_line_goes_on() -> None:
    headers = {"X-Claude-Code-Session-Id": "s1"}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=1"}
    rules = {"type": "text", "text": "rules", "cache_control": {"type": "ephemeral"}}
    with running(CALLS, "done") as (gateway, speaker):
        ask = client(gateway.url).messages.create
        fixed = {"model": "claude-x", "max_tokens": 400, "tools": TOOLS, "extra_headers": headers}
        start = [
            {
                "role": "user",
                "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
            }
        ]
        first = ask(system=[billing, rules], messages=start, **fixed)
        uses = [b for b in first.content if b.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": u.id, "content": f"of {u.input['at']}"} for u in uses[::-1]
        ]
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in first.content]},
            {"role": "user", "content": [*results, {"type": "text", "text": "reminder"}]},
            {"role": "system", "content": "later rules"},
        ]
        other = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=2"}
        plain = {"type": "text", "text": "rules"}
        second = ask(system=[other, plain], messages=messages, **fixed)
        assert second.content[0].text == "done"
        before = (*speaker.asked[0].token_ids, *speaker.answered[0])
        assert speaker.asked[1].token_ids[: len(before)] == before
        new = text(speaker.asked[1].token_ids[len(before) :])
        places = [new.index(t) for t in ("of b", "of a", "reminder", "later rules")]
        assert places == sorted(places)
        assert "billing" not in text(speaker.asked[1].token_ids)


def test_stop_sequences_and_limits_have_their_own_reasons() -> None:
    with running("a STOP b") as (gateway, _):
        ask = client(gateway.url).messages.create
        stopped = ask(model="policy", max_tokens=99, messages=HI, stop_sequences=["STOP"])
        assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
            "a ",
            "stop_sequence",
            "STOP",
        )
        cut = ask(model="policy", max_tokens=2, messages=HI)
        assert cut.stop_reason == "max_tokens"


def test_tokens_are_counted() -> None:
    with running("x") as (gateway, speaker):
        counted = client(gateway.url).messages.count_tokens(model="policy", messages=HI, tools=TOOLS)
        client(gateway.url).messages.create(model="policy", max_tokens=9, messages=HI, tools=TOOLS)
        assert counted.input_tokens == len(speaker.asked[0].token_ids)


def test_errors_have_the_apis_own_shape() -> None:
    with running("x") as (gateway, _):
        with pytest.raises(anthropic.BadRequestError) as caught:
            client(gateway.url).messages.create(model="policy", max_tokens=9, messages=[])
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError):
            client(gateway.url).messages.create(model="nobody", max_tokens=9, messages=HI)
        answer = HTTP.get(f"{gateway.url}/v1/messages/nothing")
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
