"""The Responses API through OpenAI's SDK, and in the forms that Codex sends and needs."""

import json

import openai
import pytest
from gateway_http_kit import HTTP, openai_client, running
from gateway_kit import ids, text
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

CALLS = (
    '<think>\nlook first\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at":"a"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "mcp__disk__read", "arguments": {"at":"b"}}\n</tool_call>'
)
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
TOOLS = [
    LOOK,
    {
        "type": "namespace",
        "name": "mcp__disk",
        "tools": [{"type": "function", "name": "read", "parameters": {}}],
    },
    {"type": "web_search"},
]
EVENT = TypeAdapter(ResponseStreamEvent)


client = openai_client


def events_of(url: str, **body) -> list[dict]:
    """The events of a stream, each as the SDK's own type, in which `event:` and `type` agree."""
    found = []
    with HTTP.stream(
        "POST", url + "/v1/responses", json={"model": "policy", "stream": True, **body}, timeout=10
    ) as r:
        assert r.status_code == 200, r.read()
        for frame in r.read().decode().split("\n\n"):
            if frame:
                name, data = frame.split("\n", 1)
                tree = json.loads(data.removeprefix("data: "))
                assert name == f"event: {tree['type']}"
                EVENT.validate_python(tree)
                found.append(tree)
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def test_a_whole_response() -> None:
    with running(CALLS) as (gateway, speaker):
        raw = client(gateway.url).responses.with_raw_response.create(
            model="policy", instructions="be kind", input="hi", tools=[LOOK], max_output_tokens=500
        )
        answer = raw.parse()
        Response.model_validate(json.loads(raw.content))
        assert answer.output_text == "I look."
        assert [item.type for item in answer.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]
        assert answer.output[0].content[0].text == "look first"
        assert answer.output[2].arguments == '{"at":"a"}'
        assert answer.usage.output_tokens == len(ids(CALLS)) + 1
        assert "be kind" in text(speaker.asked[0].token_ids)


def test_the_sdks_stream_helper_accepts_every_event() -> None:
    with (
        running("hello there") as (gateway, _),
        client(gateway.url).responses.stream(model="policy", input="hi") as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
        assert final.output_text == "hello there"
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"


def test_items_open_fill_and_close_in_order() -> None:
    with running(CALLS) as (gateway, _):
        events = events_of(gateway.url, input="hi", tools=TOOLS)
        kinds = [e["type"].removeprefix("response.") for e in events]
        squeezed = [k for i, k in enumerate(kinds) if not i or kinds[i - 1] != k]
        call = [
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert squeezed == [
            *("created", "in_progress"),
            *("output_item.added", "reasoning_text.delta", "reasoning_text.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
            *("content_part.done", "output_item.done"),
            *call,
            *call,
            "completed",
        ]
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        assert [e["output_index"] for e in events if e["type"] == "response.output_item.done"] == [0, 1, 2, 3]
        assert (done[3]["namespace"], done[3]["name"]) == ("mcp__disk", "read")
        assert len({item["id"] for item in done}) == 4


def test_a_replay_goes_on_from_the_sampled_tokens_by_the_clients_thread() -> None:
    headers = {"session-id": "s", "thread-id": "s"}
    with running(CALLS, "done") as (gateway, speaker):
        ask = client(gateway.url).responses.create
        start = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ]
        options = {"include": ["reasoning.encrypted_content"], "store": False, "parallel_tool_calls": True}
        first = ask(model="gpt-5", input=start, tools=TOOLS, extra_headers=headers, **options)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in reversed(calls)
        ]
        replay = [item.model_dump(exclude_none=True) for item in first.output]
        answer = ask(
            model="gpt-5", input=[*start, *replay, *results], tools=TOOLS, extra_headers=headers, **options
        )
        assert answer.output_text == "done"
        before = (*speaker.asked[0].token_ids, *speaker.answered[0])
        assert speaker.asked[1].token_ids[: len(before)] == before


def test_a_turn_cut_by_its_limit_is_incomplete() -> None:
    with running("hello there") as (gateway, _):
        events = events_of(gateway.url, input="hi", max_output_tokens=2)
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_custom_tools_take_free_text() -> None:
    said = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    with running(said) as (gateway, _):
        events = events_of(gateway.url, input="hi", tools=[{"type": "custom", "name": "patch"}])
        item = events[-1]["response"]["output"][0]
        assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")


@pytest.mark.parametrize(
    "extra",
    [{"previous_response_id": "resp_1"}, {"input": []}, {"input": 3}, {"input": [{"type": "computer_call"}]}],
)
def test_what_is_not_supported_is_refused_in_words(extra) -> None:
    with running("x") as (gateway, _), pytest.raises(openai.BadRequestError) as caught:
        client(gateway.url).responses.create(**{"model": "policy", "input": "hi", **extra})
    assert caught.value.param
