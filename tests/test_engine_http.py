"""An engine over HTTP: the same answers, few POSTs, errors mapped back, and nothing left running behind a client."""

import asyncio
import contextlib
import dataclasses
import socket

import aiohttp
import pytest

from headrace.producers.engines.client import HttpEngineClient
from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.scripted import ScriptedEngine, scripted_token
from headrace.producers.engines.server import EngineServer, HttpServer, bind, url_of
from headrace.schemas.errors import ConfigError, EngineError, EnginePoisonedError


class Held:
    """Lets a test decide when tokens are sampled."""

    def __init__(self, *, open_: bool = True) -> None:
        self.open = asyncio.Event()
        self.asked = asyncio.Event()
        if open_:
            self.open.set()

    async def __call__(self) -> None:
        self.asked.set()
        await self.open.wait()
        await asyncio.sleep(0)


class Counting(EngineServer):
    posts = 0

    async def _generate(self, request):
        self.posts += 1
        return await super()._generate(request)


@contextlib.asynccontextmanager
async def serving(engine, **settings):
    listening = bind("127.0.0.1", 0)
    made = Counting(engine, info=lambda: {"engine_id": "e"})
    server = HttpServer(made.app)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    client = HttpEngineClient(url_of(listening), **settings)
    try:
        yield made, client
    finally:
        await client.close()
        server.should_exit = True
        await running
        listening.close()


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def ask(i: int = 0, **more) -> GenerateRequest:
    return GenerateRequest(request_id=f"r{i}", token_ids=(1, 2, i % 64), **{"max_tokens": 5, **more})


def test_results_are_those_of_the_engine_bit_for_bit():
    async def main():
        engine = ScriptedEngine(version=3)
        async with serving(engine) as (_, client):
            over_http = await client.generate(ask(7, max_tokens=40))
            assert over_http == await engine.generate(ask(7, max_tokens=40))
            assert over_http.logprobs[0] == scripted_token((1, 2, 7), 3, 64)[1]

    asyncio.run(main())


def test_calls_made_together_share_a_post_and_each_gets_its_own_answer():
    async def main():
        async with serving(ScriptedEngine(version=0)) as (server, client):
            results = await asyncio.gather(
                *(client.generate(ask(i, max_tokens=1 + i % 9)) for i in range(200))
            )
            assert [r.request_id for r in results] == [f"r{i}" for i in range(200)]
            assert [len(r.token_ids) for r in results] == [1 + i % 9 for i in range(200)]
            assert all(
                r.token_ids[0] == scripted_token((1, 2, i % 64), 0, 64)[0] for i, r in enumerate(results)
            )
            assert server.posts == 1

    asyncio.run(main())


def test_a_request_that_is_done_does_not_wait_for_those_it_came_with():
    async def main():
        held = Held()
        async with serving(ScriptedEngine(version=0, gate=held)) as (_, client):
            long = asyncio.create_task(client.generate(ask(1, max_tokens=10**9)))
            short = await client.generate(ask(2, max_tokens=3))
            assert len(short.token_ids) == 3 and not long.done()
            long.cancel()

    asyncio.run(main())


def test_long_answers_arrive_whole():
    async def main():
        async with serving(ScriptedEngine(version=0)) as (_, client):
            result = await client.generate(ask(max_tokens=6_000))
            assert len(result.token_ids) == len(result.logprobs) == 6_000

    # the scripted engine hashes the whole context for every token
    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_bad_request_fails_alone():
    async def main():
        async with serving(ScriptedEngine(version=0)) as (server, client):
            good, bad = await asyncio.gather(
                client.generate(ask()),
                client.generate(dataclasses.replace(ask(), token_ids=(1, 99))),
                return_exceptions=True,
            )
            assert len(good.token_ids) == 5
            assert type(bad) is EngineError and "token id" in str(bad)
            assert server.posts == 1

    asyncio.run(main())


def test_errors_keep_their_kind():
    async def main():
        engine = ScriptedEngine(version=0)
        async with serving(engine) as (_, client):
            engine.poison()
            with pytest.raises(EnginePoisonedError):
                await client.generate(ask())

    asyncio.run(main())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"requests": [{}]}', b'{"requests": [{"token_ids": 3}]}']
)
def test_a_body_that_is_none_is_answered_with_400(body):
    async def main():
        async with serving(ScriptedEngine(version=0)) as (_, client), aiohttp.ClientSession() as session:
            async with session.post(f"{client.url}/generate", data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]
            assert len((await client.generate(ask())).token_ids) == 5

    asyncio.run(main())


def test_token_ids_that_are_no_whole_numbers_are_refused():
    async def main():
        body = b'{"requests": [{"request_id": "a", "token_ids": [1, true, 2.5], "max_tokens": 2}]}'
        async with (
            serving(ScriptedEngine(version=0)) as (_, client),
            aiohttp.ClientSession() as session,
            session.post(f"{client.url}/generate", data=body) as response,
        ):
            assert response.status == 400 and "whole numbers" in await response.text()

    asyncio.run(main())


def test_cancelling_one_call_aborts_it_in_the_engine_and_no_other():
    async def main():
        held = Held(open_=False)
        engine = ScriptedEngine(version=0, gate=held)
        async with serving(engine) as (_, client):
            kept, dropped = (asyncio.create_task(client.generate(ask(i, max_tokens=4))) for i in range(2))
            await until(lambda: engine.running == 2)
            dropped.cancel()
            await until(lambda: engine.running == 1)
            held.open.set()
            assert len((await kept).token_ids) == 4
            with pytest.raises(asyncio.CancelledError):
                await dropped

    asyncio.run(main())


def test_a_call_that_is_cancelled_before_it_is_sent_is_never_sent():
    async def main():
        async with serving(ScriptedEngine(version=0), window_seconds=0.05) as (server, client):
            task = asyncio.create_task(client.generate(ask()))
            await asyncio.sleep(0)
            task.cancel()
            await client.generate(ask(1))
            assert server.posts == 1 and task.cancelled()

    asyncio.run(main())


def test_a_client_that_goes_away_aborts_all_it_asked_for():
    async def main():
        held = Held(open_=False)
        engine = ScriptedEngine(version=0, gate=held)
        async with serving(engine) as (server, client):
            tasks = [asyncio.create_task(client.generate(ask(i))) for i in range(5)]
            await until(lambda: engine.running == 5)
            await client.close()
            await until(lambda: engine.running == 0)
            assert all(
                isinstance(r, EngineError) for r in await asyncio.gather(*tasks, return_exceptions=True)
            )
            assert not server._tasks

    asyncio.run(main())


def test_an_engine_that_is_not_there_is_an_engine_error():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        client = HttpEngineClient(f"http://127.0.0.1:{port}")
        try:
            with pytest.raises(EngineError, match="does not answer"):
                await client.generate(ask())
            with pytest.raises(EngineError, match="does not answer"):
                await client.info()
        finally:
            await client.close()

    asyncio.run(main())


def test_an_engine_that_dies_in_the_middle_is_an_engine_error():
    async def die(reader, writer):
        await reader.readuntil(b"}]}")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.close()

    async def main():
        server = await asyncio.start_server(die, "127.0.0.1", 0)
        client = HttpEngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            with pytest.raises(EngineError):
                await client.generate(ask())
        finally:
            await client.close()
            server.close()

    asyncio.run(main())


def test_an_answer_that_is_no_result_is_an_engine_error():
    async def lie(reader, writer):
        await reader.readuntil(b"}]}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhello!!\n")
        writer.close()

    async def main():
        server = await asyncio.start_server(lie, "127.0.0.1", 0)
        client = HttpEngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            with pytest.raises(EngineError, match="something else"):
                await client.generate(ask())
        finally:
            await client.close()
            server.close()

    asyncio.run(main())


def test_health_and_info_say_what_is_served():
    async def main():
        engine = ScriptedEngine()
        async with serving(engine) as (_, client), aiohttp.ClientSession() as session:
            async with session.get(f"{client.url}/health") as response:
                assert response.status == 503
            engine._version = 4
            async with session.get(f"{client.url}/health") as response:
                said = {"healthy": True, "version": 4, "paused": False}
                assert response.status == 200 and await response.json() == said
            info = await client.info()
            assert info["version"] == 4 and info["vocab_size"] == 64 and info["engine_id"] == "e"
            assert info["logprobs_mode"] == "processed"

    asyncio.run(main())


def test_an_operators_pause_stops_tokens_until_it_is_ended_and_loses_no_request():
    async def main():
        engine = ScriptedEngine(version=0)
        async with serving(engine) as (_, client), aiohttp.ClientSession() as session:

            async def tell(what: str) -> dict:
                async with session.post(f"{client.url}/{what}") as response:
                    assert response.status == 200
                    return await response.json()

            assert await tell("resume") == {"paused": False, "version": 0}  # nothing to end
            turn = asyncio.create_task(client.generate(ask(max_tokens=3000)))
            await until(lambda: engine.generated_tokens > 10)
            for _ in range(2):  # a second operator's changes nothing
                assert await tell("pause") == {"paused": True, "version": 0}
            before = engine.generated_tokens
            late = asyncio.create_task(client.generate(ask(1)))
            await until(lambda: engine.running == 2)
            assert (await client.info())["paused"] is True
            assert engine.generated_tokens == before < 3000
            assert (await tell("resume"))["paused"] is False
            assert len((await turn).token_ids) == 3000 and len((await late).token_ids) == 5

    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", ""])
def test_only_loopback_is_served(host):
    with pytest.raises(ConfigError, match="loopback"):
        bind(host, 0)


def test_a_port_in_use_is_explained():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* choose another, or 0"):
            bind("127.0.0.1", port)
