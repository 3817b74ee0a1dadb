"""Chat completions and completions through OpenAI's SDK, on a real port."""

import json

import pytest
from gateway_http_kit import HTTP, Running, Speaker, in_turn, openai_client, running
from gateway_kit import END, THINK, ids, text
from openai.types.chat import ChatCompletion, ChatCompletionChunk

CALLS = (
    '<think>\nlook first\n</think>\n\nI look.\n<tool_call>\n{"name": "look", "arguments": {"at":"a"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "look", "arguments": {"at":"b"}}\n</tool_call>'
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
HI = [{"role": "user", "content": "hi"}]


client = openai_client


def added_up(chunks) -> tuple[str, str, dict, list[str]]:
    """(text, reasoning, calls by index, finish reasons) of a stream of one choice."""
    said, thought, calls, reasons = "", "", {}, []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump())
        for choice in chunk.choices:
            said += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                calls.setdefault(call.index, []).append(call)
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    return said, thought, calls, reasons


def test_an_answer_whole() -> None:
    with running("hello there") as (gateway, speaker):
        raw = client(gateway.url).chat.completions.with_raw_response.create(model="gpt-5", messages=HI)
        answer = raw.parse()
        ChatCompletion.model_validate(json.loads(raw.content))
        assert answer.choices[0].message.content == "hello there"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(speaker.asked[0].token_ids)
        assert raw.headers["x-headrace-policy-version"] == "3"
        assert len(raw.headers["x-headrace-rollout"]) == 32


def test_a_stream_says_the_same_and_ends_with_usage() -> None:
    with running("hello €") as (gateway, _):
        stream = client(gateway.url).chat.completions.create(
            model="gpt-5", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        said, _, _, reasons = added_up(chunks)
        assert (said, reasons) == ("hello €", ["stop"])
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == len(ids("hello €")) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_two_parallel_calls_are_two_calls_each_whole_with_ids_of_their_own(stream) -> None:
    with running(CALLS) as (gateway, _):
        found = client(gateway.url).chat.completions.create(
            model="policy", messages=HI, tools=TOOLS, stream=stream
        )
        if stream:
            said, thought, calls, reasons = added_up(found)
            assert sorted(calls) == [0, 1] and all(len(parts) == 1 for parts in calls.values())
            made = [calls[0][0], calls[1][0]]
        else:
            choice = found.choices[0]
            said, thought, made = (
                choice.message.content,
                choice.message.reasoning_content,
                choice.message.tool_calls,
            )
            reasons = [choice.finish_reason]
        assert (said, thought, reasons) == ("I look.", "look first", ["tool_calls"])
        assert [c.function.arguments for c in made] == ['{"at":"a"}', '{"at":"b"}']
        assert len({c.id for c in made}) == 2


def test_results_in_reverse_order_stay_in_the_clients_order() -> None:
    with running(CALLS, "done") as (gateway, speaker):
        ask = client(gateway.url, "k#s").chat.completions.create
        first = ask(model="policy", messages=HI, tools=TOOLS).choices[0].message
        a, b = (c.id for c in first.tool_calls)
        replay = {
            "role": "assistant",
            "content": first.content,
            "tool_calls": [c.model_dump() for c in first.tool_calls],
        }
        results = [
            {"role": "tool", "tool_call_id": b, "content": "of b"},
            {"role": "tool", "tool_call_id": a, "content": "of a"},
        ]
        ask(model="policy", messages=[*HI, replay, *results], tools=TOOLS)
        before = (*speaker.asked[0].token_ids, *speaker.answered[0])
        after = speaker.asked[1].token_ids
        assert after[: len(before)] == before
        assert text(after).index("of b") < text(after).index("of a")


def test_null_content_beside_calls_is_no_word() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "a"}'}}
    with running("ok") as (gateway, speaker):
        messages = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "x"},
        ]
        client(gateway.url).chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        prompt = text(speaker.asked[0].token_ids)
        assert '{"name": "look", "arguments": {"at": "a"}}' in prompt
        assert "None" not in prompt


def test_fields_that_nobody_knows_are_ignored_and_old_and_new_ones_are_read() -> None:
    with running("a STOP b") as (gateway, speaker):
        answer = client(gateway.url).chat.completions.create(
            model="policy",
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            max_completion_tokens=20,
            stop=["STOP"],
            logprobs=True,
            top_logprobs=1,
            temperature=0.5,
            extra_body={"chat_template_kwargs": {"x": 1}, "prediction": None, "brand_new": [1]},
        )
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("a ", "stop")
        assert [t.logprob for t in choice.logprobs.content] == [-0.25] * len("a STOP")
        assert (speaker.asked[0].max_tokens, speaker.asked[0].temperature) == (20, 0.5)
        assert "be kind" in text(speaker.asked[0].token_ids)


def test_a_stop_string_ends_the_engines_work_and_what_was_sampled_is_recorded() -> None:
    with running("a STOP b") as (gateway, speaker):
        raw = client(gateway.url).chat.completions.with_raw_response.create(
            model="policy", messages=HI, stop="STOP"
        )
        rollout = raw.headers["x-headrace-rollout"]
        assert HTTP.post(f"{gateway.url}/rollouts/{rollout}/finish").json()["trajectories"] == 1
        assert speaker.running == 0
        row = gateway.published[0]
        assert row.token_ids[row.loss_mask].tolist() == ids("a STOP")


def test_n_choices_are_siblings() -> None:
    with running("one", "two", "three") as (gateway, _):
        raw = client(gateway.url).chat.completions.with_raw_response.create(model="policy", messages=HI, n=3)
        assert sorted(c.message.content for c in raw.parse().choices) == ["one", "three", "two"]
        said = {0: "", 1: "", 2: ""}
        for chunk in client(gateway.url).chat.completions.create(
            model="policy", messages=HI, n=3, stream=True
        ):
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
        assert set(said.values()) == {"three"}
        rollout = raw.headers["x-headrace-rollout"]
        assert HTTP.post(f"{gateway.url}/rollouts/{rollout}/finish").json()["trajectories"] == 3


def test_an_engine_that_gives_whole_turns_is_served_in_one_piece() -> None:
    with Running(Speaker(in_turn("whole"), streams=False)) as gateway:
        chunks = list(client(gateway.url).chat.completions.create(model="policy", messages=HI, stream=True))
        assert added_up(chunks)[0] == "whole"


@pytest.mark.parametrize("stream", [False, True])
def test_completions_go_on_from_text_and_from_ids(stream) -> None:
    with running("more") as (gateway, speaker):
        ask = client(gateway.url).completions.create
        for prompt in ("say <think>", ids("say"), ["say"]):
            found = ask(
                model="policy",
                prompt=prompt,
                max_tokens=9,
                logprobs=1,
                stream=stream,
                echo=prompt == ids("say"),
            )
            chunks = list(found) if stream else [found]
            assert "".join(c.choices[0].text for c in chunks if c.choices) == (
                "saymore" if prompt == ids("say") else "more"
            )
            assert chunks[-1].choices[0].finish_reason == "stop"
        assert THINK not in speaker.asked[0].token_ids
        assert speaker.asked[1].token_ids == tuple(ids("say"))


def test_completions_are_rollouts_of_their_own() -> None:
    with running("more") as (gateway, _):
        body = {"model": "policy", "prompt": ids("say"), "n": 2}
        answer = HTTP.post(gateway.url + "/v1/completions", json=body)
        rollout = answer.headers["x-headrace-rollout"]
        assert HTTP.post(f"{gateway.url}/rollouts/{rollout}/finish").json()["trajectories"] == 2
        for row in gateway.published:
            assert row.token_ids.tolist() == [*ids("say"), *ids("more"), END]
            assert row.loss_mask.tolist() == [False] * len(ids("say")) + [True] * (len(ids("more")) + 1)


def test_models_are_listed() -> None:
    with running("x") as (gateway, _):
        assert [m.id for m in client(gateway.url).models.list()] == ["policy"]
        assert client(gateway.url).models.retrieve("gpt-x").id == "gpt-x"


def test_torn_results_are_served_and_never_trained() -> None:
    with running("four") as (gateway, speaker):
        speaker.lost_logprobs = 1
        raw = client(gateway.url).chat.completions.with_raw_response.create(model="policy", messages=HI)
        assert raw.parse().choices[0].message.content == "four"
        HTTP.post(f"{gateway.url}/rollouts/{raw.headers['x-headrace-rollout']}/finish")
        assert gateway.published[0].reason.startswith("length_mismatch")
        assert speaker.answered[0][-1] == END
