"""Bad input of every kind gets a 4xx in the API's own shape, and never a 5xx."""

import asyncio
import copy
import json

import pytest
from gateway_http_kit import Running, Speaker, in_turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.producers.gateway.limits import Limits

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
LISTED = {"type": "function", **FUNCTION}
TEXT = {"type": "text", "text": "x"}
BODIES = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "n": 2,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 2,
        "stream": False,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "r"}],
                "encrypted_content": "h",
            },
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "n", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ],
        "tools": [
            {"type": "function", **FUNCTION},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
        ],
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 5,
        "stream": False,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "stop_sequences": ["a"],
        "thinking": {"type": "adaptive"},
        "stream": False,
    },
    "/v1/completions": {
        "model": "policy",
        "prompt": "hi",
        "max_tokens": 5,
        "n": 2,
        "logprobs": 1,
        "echo": True,
        "stop": "a",
        "stream": False,
    },
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "<|im_end|>",
            "\ud800",
            "\x00",
            "none",
            [],
            {},
            [[]],
            [{}],
            [None],
            [1],
            {"type": "x"},
            {"type": None},
        ]
    ),
)
WIRED = Running(
    Speaker(in_turn("<think>x</think>hé")), limits=Limits(body_bytes=1 << 20, messages=500), patience=0.0
)


@pytest.fixture(scope="module")
def ask():
    """(path, body) -> (status, answer's body), without a socket."""
    with WIRED as gateway:

        def call(path: str, body: bytes) -> tuple[int, bytes]:
            async def run() -> tuple[int, bytes]:
                sent = [{"type": "http.request", "body": body}]
                found: list[dict] = []

                async def receive() -> dict:
                    if sent:
                        return sent.pop()
                    await asyncio.Event().wait()
                    raise AssertionError

                async def send(message: dict) -> None:
                    found.append(message)

                scope = {
                    "type": "http",
                    "method": "POST",
                    "path": path,
                    "headers": [],
                    "query_string": b"",
                    "root_path": "",
                }
                await gateway.asgi(scope, receive, send)
                return found[0]["status"], b"".join(m.get("body", b"") for m in found[1:])

            return asyncio.run_coroutine_threadsafe(run(), gateway.loop).result(10)

        yield call


def places(tree, at=()):
    """Every place in a JSON value."""
    yield at
    for key, value in (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    ):
        yield from places(value, (*at, key))


def check(path: str, status: int, body: bytes) -> None:
    assert 200 <= status < 500, body
    if status == 200:
        assert body
        return
    tree = json.loads(body)
    assert isinstance(tree["error"]["message"], str) and tree["error"]["type"]
    assert ("type" in tree) == ("/messages" in path)


@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_value_of_another_kind_in_any_place(ask, data) -> None:
    path = data.draw(st.sampled_from([*BODIES, "/v1/messages/count_tokens"]))
    tree = copy.deepcopy(BODIES.get(path, BODIES["/v1/messages"]))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(sorted(places(tree), key=repr)))
        value = data.draw(ODD)
        if not where:
            continue
        holder = tree
        for key in where[:-1]:
            holder = holder[key]
        if data.draw(st.booleans()) or isinstance(holder, list):
            holder[where[-1]] = value
        else:
            del holder[where[-1]]
    if data.draw(st.booleans()):
        tree["stream"] = True
    check(path, *ask(path, json.dumps(tree).encode()))


@given(
    path=st.sampled_from([*BODIES, "/v1/messages/count_tokens"]),
    body=st.binary(max_size=40) | st.text(max_size=40).map(lambda t: json.dumps(t).encode()),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_request(ask, path, body) -> None:
    status, answer = ask(path, body)
    check(path, status, answer)
    assert status == 400


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_that_are_varied_are_good_ones(ask, path) -> None:
    status, body = ask(path, json.dumps(BODIES[path]).encode())
    assert status == 200, body


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": "policy", "messages": [' + b"[" * 100_000, 400),
        (b'{"model": "policy", "a": ' + b"9" * 5000 + b"}", 400),
        (b'{"model": "\xff"}', 400),
        (b'{"model": "\\ud800"}', 400),
        (b"", 400),
        (b"{}", 400),
        (b" " * ((1 << 20) + 1), 413),
    ],
    ids=["nested", "digits", "utf8", "surrogate", "empty", "nothing", "large"],
)
def test_hostile_bodies(ask, path, body, status) -> None:
    found, answer = ask(path, body)
    check(path, found, answer)
    assert found == status


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_is_not_found(ask, path) -> None:
    status, answer = ask(path, json.dumps({**BODIES[path], "model": "nobody"}).encode())
    check(path, status, answer)
    assert status == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_ten_thousand_messages_are_refused(ask, path) -> None:
    many = [{"role": "user", "content": "hi"}] * 10_000
    name = "input" if path == "/v1/responses" else "messages"
    status, answer = ask(path, json.dumps({**BODIES[path], name: many}).encode())
    check(path, status, answer)
    assert status == 400
