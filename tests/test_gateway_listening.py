"""Sampled tokens -> what a client hears, and when."""

import itertools
import json

import pytest
from gateway_http_kit import Bytes
from hypothesis import given
from hypothesis import strategies as st

from headrace.producers.gateway.answer import Answer, Called, Done, Reasoning, Text
from headrace.producers.gateway.listening import Listener, listen_to
from headrace.producers.gateway.messages import Call, Sampling, Tool
from headrace.producers.gateway.spelling import Marks
from headrace.producers.gateway.toolparse import parse_call

BYTES = Bytes()
MARKLESS = Bytes(without=("<think>", "</think>", "<tool_call>", "</tool_call>"))
TOOL = Tool(name="look", parameters={"properties": {"at": {"type": "string"}, "n": {"type": "integer"}}})


def listener(*, stop=(), vocabulary=BYTES, call=None, reasoning=False) -> Listener:
    call = call or Call(model="m", messages=(), tools=(TOOL,), sampling=Sampling(stop=stop), logprobs=True)
    ids = (f"call_{i}" for i in itertools.count())
    return Listener(
        vocabulary, Marks(vocabulary), call, index=0, new_id=lambda: next(ids), reasoning=reasoning
    )


def heard(text: str, finish: str = "stop", vocabulary=BYTES, **kwargs):
    """(events, their sum) of an answer, one token at a time."""
    found = listener(vocabulary=vocabulary, **kwargs)
    ids = vocabulary.encode(text)
    events, taken = [], 0
    for token in ids:  # a piece each, so that nothing is joined
        some, said = listen_to(found, [token], [-0.5])
        events += said
        taken += some
        if found.stop_text is not None:
            break
    events += found.end(finish)
    answer = Answer()
    for event in events:
        answer.add(event)
    return events, answer, taken


def test_text_leaves_as_it_comes() -> None:
    events, answer, _ = heard("abc<|im_end|>")
    assert [e.text for e in events if isinstance(e, Text)] == ["a", "b", "c"]
    assert answer.text == "abc"
    assert [t.logprob for t in answer.tokens] == [-0.5] * 4
    assert isinstance(events[-1], Done)


def test_half_a_character_is_held_back() -> None:
    events, answer, _ = heard("a€𝄞!")
    assert [e.text for e in events if isinstance(e, Text)] == ["a", "€", "𝄞", "!"]
    assert answer.text == "a€𝄞!"


def test_a_character_that_is_never_finished_is_replaced_at_the_end() -> None:
    found = listener()
    _, events = listen_to(found, BYTES.encode("€")[:2], [-1.0, -1.0])
    assert events == []
    assert found.end("length")[0].text == "\ufffd"


def test_a_stop_string_ends_the_turn_at_the_token_that_completes_it() -> None:
    _, answer, taken = heard("one STOP two", stop=("STOP",))
    assert taken == len("one STOP")
    assert (answer.text, answer.stop_text, answer.finish_reason) == ("one ", "STOP", "stop")


def test_what_may_become_a_stop_string_is_held_and_then_said() -> None:
    events, answer, _ = heard("a##b###", stop=("###",))
    texts = [e.text for e in events if isinstance(e, Text)]
    assert texts == ["a", "##b"]
    assert answer.stop_text == "###"
    assert heard("a##", stop=("###",))[1].text == "a##"


@pytest.mark.parametrize("vocabulary", [BYTES, MARKLESS], ids=["marks", "text"])
def test_reasoning_then_two_calls_then_text(vocabulary) -> None:
    text = (
        "<think>\nfirst, look\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "look", "arguments": {"at":"a b",  "n": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    )
    events, answer, _ = heard(text, vocabulary=vocabulary)
    assert answer.reasoning == "first, look"
    assert answer.text == "I look."
    assert [c.arguments for c in answer.calls] == ['{"at":"a b",  "n": 1}', "{}"]
    assert [c.id for c in answer.calls] == ["call_0", "call_1"]
    kinds = [k for k, _ in itertools.groupby(type(e) for e in events)]
    assert kinds == [Reasoning, Text, Called, Done]


def test_reasoning_that_the_prompt_has_opened() -> None:
    _, answer, _ = heard("\nhm\n</think>\n\nyes", reasoning=True)
    assert (answer.reasoning, answer.text) == ("hm", "yes")


def test_reasoning_cut_by_length_is_reasoning() -> None:
    _, answer, _ = heard("<think>so far", "length")
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("so far", "", "length")


@pytest.mark.parametrize(
    "broken",
    ['{"name": "look", "arguments": {', '{"name": "look", "arguments": [1]}', "not a call", '{"a": NaN}'],
)
def test_what_is_no_call_is_text(broken) -> None:
    _, answer, _ = heard(f"<tool_call>\n{broken}\n</tool_call>")
    assert answer.calls == []
    assert broken in answer.text


def test_a_call_without_its_closing_mark_counts_when_it_is_whole() -> None:
    _, answer, _ = heard('<tool_call>\n{"name": "look", "arguments": {"n": 2}}<|im_end|>')
    assert json.loads(answer.calls[0].arguments) == {"n": 2}


def test_marks_that_text_spells_are_text_where_the_vocabulary_has_marks() -> None:
    found = listener()
    ids = [i for c in "say <tool_call>" for i in BYTES.encode(c)]
    _, events = listen_to(found, ids, [0.0] * len(ids))
    assert "".join(e.text for e in [*events, *found.end("stop")] if isinstance(e, Text)) == "say <tool_call>"


def test_xml_calls_become_json_by_the_schema() -> None:
    tools = {"look": TOOL}
    body = "<function=look>\n<parameter=at>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>"
    assert parse_call(body, tools) == ("look", '{"at": "12", "n": 12}')
    glm = (
        "look\n<arg_key>at</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key><arg_value>3</arg_value>"
    )
    assert parse_call(glm, tools) == ("look", '{"at": "x", "n": 3}')
    assert parse_call('{"name": "f", "arguments": "{\\"a\\": 1}"}', {}) == ("f", '{"a": 1}')


@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                " ",
                "\n",
                "é",
                "<think>",
                "</think>",
                "<tool_call>",
                "</tool_call>",
                "<",
                "END",
                "E",
                '{"name":"f"}',
            ]
        ),
        max_size=14,
    ),
    st.sampled_from([BYTES, MARKLESS]),
    st.booleans(),
)
def test_any_answer_ends_once_and_the_sum_of_its_pieces_is_never_cut(parts, vocabulary, reasoning) -> None:
    text = "".join(parts)
    events, answer, taken = heard(text, vocabulary=vocabulary, stop=("END",), reasoning=reasoning)
    assert [isinstance(e, Done) for e in events].count(True) == 1
    assert ("END" in text) == (answer.stop_text is not None) or "END" not in "".join(parts)
    assert all(isinstance(json.loads(c.arguments), dict) for c in answer.calls)
    assert len(answer.tokens) <= taken
    said = answer.text + (answer.reasoning or "")
    assert "END" not in said
    assert said.count("a") + sum(c.arguments.count("a") for c in answer.calls) <= text.count("a")
