"""The gateway under clients that leave, repeat themselves or may not, and engines that fail or change."""

import asyncio
import hashlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from gateway_http_kit import HTTP, Running, Speaker, in_turn, running, status
from gateway_kit import END, ids

from headrace.producers.gateway.keys import Key, KeyRing, check_address, load_keys
from headrace.producers.gateway.limits import Limits
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import ConfigError

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


class Gate:
    """Lets an engine sample up to a token, and tells when it waits there."""

    def __init__(self, at: int) -> None:
        self.at, self.reached, self.open = at, threading.Event(), threading.Event()

    async def __call__(self, i: int) -> None:
        if i == self.at:
            self.reached.set()
            while not self.open.is_set():  # noqa: ASYNC110  (it is set in another thread)
                await asyncio.sleep(0.005)


def post(gateway: Running, body=HI, path: str = CHAT, **headers) -> httpx.Response:
    named = {k.replace("_", "-"): v for k, v in headers.items()}
    return HTTP.post(gateway.url + path, json=body, headers=named)


def finish(gateway: Running, answer: httpx.Response) -> dict:
    return HTTP.post(
        f"{gateway.url}/rollouts/{answer.headers['x-headrace-rollout']}/finish", timeout=10
    ).json()


def until(true) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_engine_request(stream) -> None:
    with running("hello there") as (gateway, speaker):
        speaker.before = gate = Gate(4)
        body = json.dumps({**HI, "stream": stream}).encode()
        with socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))) as connection:
            head = (
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: k#left\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            assert gate.reached.wait(10)
        until(lambda: speaker.running == 0)
        assert speaker.aborted == 1
        until(lambda: gateway.gateway.in_flight == 0)
        rollout = next(r for r in gateway.call(gateway.gateway.rollouts.all) if r.name == "left")
        nodes = rollout.session.tree.nodes
        assert [(n.delivered, n.finish_reason, n.sampled.tolist()) for n in nodes] == [
            (False, "abort", ids("hello there")[:4])
        ]
        HTTP.post(f"{gateway.url}/rollouts/{rollout.id}/finish")
        assert [t.reason for t in gateway.published] == ["undelivered"]


def test_a_repeated_request_joins_the_one_in_flight() -> None:
    with running("one", "two") as (gateway, speaker), ThreadPoolExecutor(2) as pool:
        speaker.before = gate = Gate(1)
        first = pool.submit(post, gateway, authorization="Bearer k#joined")
        assert gate.reached.wait(10)
        second = pool.submit(post, gateway, authorization="Bearer k#joined")
        until(lambda: gateway.gateway.in_flight == 2)
        gate.open.set()
        answers = [f.result().json() for f in (first, second)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert len(speaker.asked) == 1
        third = post(gateway, authorization="Bearer k#joined")
        assert third.json()["choices"][0]["message"]["content"] == "two"
        assert finish(gateway, third)["trajectories"] == 2


def test_a_request_sent_again_after_a_503_is_one_turn() -> None:
    with Running(Speaker(in_turn("ok")), patience=0.0) as gateway:
        gateway.engines[0].failing = 1
        refused = post(gateway)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gateway.call(lambda: gateway.pool.update(status()))
        answer = post(gateway)
        assert answer.status_code == 200
        assert finish(gateway, answer)["trajectories"] == 1
        assert len(gateway.call(gateway.gateway.rollouts.all)) == 0


def test_another_engine_goes_on_when_one_dies_in_mid_turn() -> None:
    said = [*ids("hello there"), END]
    first = Speaker(lambda r: said)

    async def dies(i: int) -> None:
        if i == 3:
            from headrace.schemas.errors import EngineError

            raise EngineError("gone")

    first.before = dies
    second = Speaker(lambda r: said[3:])
    with Running(first, second) as gateway:
        answer = post(gateway)
        assert answer.json()["choices"][0]["message"]["content"] == "hello there"
        assert second.asked[0].token_ids == (*first.asked[0].token_ids, *said[:3])
        finish(gateway, answer)
        row = gateway.published[0]
        assert row.token_ids[row.loss_mask].tolist() == said


def test_a_turn_keeps_the_versions_of_its_tokens() -> None:
    with running("123456789") as (gateway, speaker):

        async def swap(i: int) -> None:
            speaker.version = 3 if i < 5 else 4

        speaker.before = swap
        answer = post(gateway)
        assert answer.headers["x-headrace-policy-version"] == "4"
        finish(gateway, answer)
        spans = gateway.published[0].version_spans
        assert [(s.version, s.end - s.start) for s in spans] == [(3, 5), (4, 5)]


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        (CHAT, b": keep-alive"),
        ("/v1/completions", b": keep-alive"),
        ("/v1/messages", b"event: ping"),
        ("/v1/responses", b"event: response.in_progress"),
    ],
)
def test_a_stream_is_kept_alive_while_an_engine_updates(path, sign) -> None:
    body = {**HI, "stream": True, "max_tokens": 50, "prompt": "hi", "input": "hi"}
    with running("hello", keepalive=0.02, patience=30) as (gateway, _):
        gateway.call(lambda: gateway.pool.update(status(state=EngineState.POISONED)))
        with HTTP.stream("POST", gateway.url + path, json=body) as answer:
            assert answer.status_code == 200
            seen = b""
            pieces = answer.iter_raw()
            while seen.count(sign) < 4:
                seen += next(pieces)
            gateway.call(lambda: gateway.pool.update(status()))
            assert b"hel" in b"".join([seen, *pieces])


def test_without_an_engine_requests_are_refused_with_503() -> None:
    with Running(patience=0.0) as gateway:
        for path in (CHAT, "/v1/responses", "/v1/messages", "/v1/completions"):
            body = {**HI, "max_tokens": 9, "prompt": "hi", "input": "hi", "stream": True}
            answer = post(gateway, body, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["type"] == (
                "overloaded_error" if "messages" in path else "server_error"
            )


def test_an_overflow_is_told_in_the_words_that_clients_know() -> None:
    long = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "x" * 200}]}
    with running("ok", limits=Limits(context_tokens=64)) as (gateway, _):
        for path, extra in (
            (CHAT, {}),
            ("/v1/responses", {"input": "x" * 200}),
            ("/v1/completions", {"prompt": "x" * 99}),
        ):
            answer = post(gateway, {**long, **extra, "stream": True}, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = post(gateway, long, "/v1/messages")
        assert answer.json()["error"]["message"].startswith("prompt is too long: 2")
        assert "64" not in answer.json()["error"]["message"].split("maximum")[1]
        clamped = post(gateway, {**HI, "max_tokens": 128000}).json()
        assert clamped["choices"][0]["message"]["content"] == "ok"


def test_limits_of_bodies_and_messages() -> None:
    with running("ok", limits=Limits(body_bytes=20_000, messages=50)) as (gateway, _):
        assert post(gateway, {**HI, "user": "x" * 20_000}).status_code == 413
        many = {**HI, "messages": HI["messages"] * 51}
        answer = post(gateway, many)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")

        def chunks():
            for _ in range(30):
                yield b" " * 1000

        assert (
            HTTP.post(gateway.url + "/v1/messages", content=chunks()).json()["error"]["type"]
            == "request_too_large"
        )


def test_sessions_are_named_by_url_key_headers_or_by_what_they_say() -> None:
    with running("ok") as (gateway, _):
        rollouts = [
            post(gateway, path="/s/run/7" + CHAT),
            post(gateway, path="/s/run/7/v1/messages", body={**HI, "max_tokens": 5}),
            post(gateway, authorization="Bearer any#run-8"),
            post(gateway, x_api_key="any#run-8"),
            post(gateway, session_id="t", thread_id="t"),
            post(gateway, session_id="t", thread_id="u", x_codex_parent_thread_id="t"),
            post(gateway, x_claude_code_session_id="c"),
            post(gateway),
            post(gateway),
        ]
        names = [r.headers["x-headrace-rollout"] for r in rollouts]
        assert [names.index(n) for n in names] == [0, 0, 2, 2, 4, 4, 6, 7, 8]
        more = [*HI["messages"], {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
        assert post(gateway, {**HI, "messages": more}).headers["x-headrace-rollout"] in names[7:]


def test_what_is_not_to_be_captured_leaves_no_trace() -> None:
    with running("ok") as (gateway, _):
        before = len(gateway.gateway.rollouts)
        answer = post(gateway, x_headrace_capture="off", session_id="secret")
        assert answer.json()["choices"][0]["message"]["content"] == "ok"
        assert "x-headrace-rollout" not in answer.headers
        assert answer.headers["x-headrace-policy-version"] == "3"
        assert len(gateway.gateway.rollouts) == before


def test_keys_decide_who_may_ask_and_whose_rollouts_are_whose(tmp_path) -> None:
    path = tmp_path / "keys.toml"
    hashes = [hashlib.sha256(k.encode()).hexdigest() for k in ("sk-a", "sk-b", "sk-quiet")]
    path.write_text(
        f'[[keys]]\nsha256 = "{hashes[0]}"\ntenant = "a"\n[[keys]]\nsha256 = "{hashes[1]}"\ntenant = "b"\n'
        f'[[keys]]\nsha256 = "{hashes[2]}"\ntenant = "a"\ncapture = false\n'
    )
    with running("ok", keys=load_keys(path, policy="policy")) as (gateway, _):
        assert post(gateway).status_code == 401
        assert post(gateway, x_api_key="sk-c").json()["error"]["code"] == "invalid_api_key"
        assert "x-headrace-rollout" not in post(gateway, x_api_key="sk-quiet").headers
        a = post(gateway, x_api_key="sk-a#s")
        b = post(gateway, authorization="Bearer sk-b#s")
        assert a.headers["x-headrace-rollout"] != b.headers["x-headrace-rollout"]
        url = f"{gateway.url}/rollouts/{a.headers['x-headrace-rollout']}/finish"
        assert HTTP.post(url, headers={"x-api-key": "sk-b"}).status_code == 404
        assert HTTP.post(url, headers={"x-api-key": "sk-a"}).json()["trajectories"] == 1


def test_a_gateway_without_keys_listens_to_this_machine_only() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_address(host, KeyRing())
    for host in ("0.0.0.0", "10.0.0.1", "example.com"):
        with pytest.raises(ConfigError, match="keys_file"):
            check_address(host, KeyRing())
        check_address(host, KeyRing([Key(sha256="0" * 64, tenant="t")]))


def test_a_keys_file_that_holds_a_key_itself_is_refused(tmp_path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nsha256 = "sk-plain"\ntenant = "t"\n')
    with pytest.raises(ConfigError, match="never the key itself"):
        load_keys(path, policy="p")


def test_feedback_and_finish() -> None:
    with running("ok") as (gateway, _):
        answer = post(gateway)
        url = f"{gateway.url}/rollouts/{answer.headers['x-headrace-rollout']}"
        for _ in range(2):
            body = {"name": "accepted", "value": True, "key": "k1", "metadata": {"by": "x"}}
            assert HTTP.post(url + "/feedback", json=body).status_code == 200
        assert gateway.feedback[0].feedback_id == gateway.feedback[1].feedback_id
        assert (gateway.feedback[0].name, gateway.feedback[0].value) == ("accepted", 1.0)
        for wrong in ({}, {"value": "x"}, {"value": 1, "name": 3}, {"value": 1, "event_ms": -1}, [1]):
            assert HTTP.post(url + "/feedback", json=wrong).status_code == 400
        first, second = (HTTP.post(url + "/finish").json() for _ in range(2))
        assert first == second
        assert [t.rollout_id for t in gateway.published] == [first["rollout_id"]]
        assert HTTP.post(f"{gateway.url}/rollouts/nobody/finish").status_code == 404
        assert [s[0] for s in gateway.published[0].stamps] == ["gateway_start", "gateway_end"]


def test_a_new_session_is_refused_with_a_reason_and_an_old_one_goes_on() -> None:
    full = []
    with running("ok", refuse=lambda: "the spool is full" if full else None) as (gateway, _):
        post(gateway, x_api_key="k#old")
        full.append(True)
        assert post(gateway, x_api_key="k#old").status_code == 200
        refused = post(gateway, x_api_key="k#new")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "the spool is full" in refused.json()["error"]["message"]
