"""An SGLang server under our engine: what each pause mode does, and what a server that misbehaves costs."""

import asyncio
import contextlib
import threading

import pytest
from sglang_stub import SglangStub, engine_on, recomputed
from weights_kit import Setup, Trainer

from headrace.producers.engines import sglang_http
from headrace.producers.engines.protocol import GenerateRequest
from headrace.producers.engines.sglang_http import Keys, ServerConnection, ServerError
from headrace.schemas.delta import decode_anchor, decode_delta
from headrace.schemas.engine import EngineState
from headrace.schemas.errors import EngineError, EnginePoisonedError, WeightUpdateError
from headrace.schemas.weights import BlobKind

VOCAB = 37
TRAINER = Trainer(anchor_every=1)
TRAINER.steps(10)
LAUNCHED = {name: bits + 1 for name, bits in TRAINER.weights[0].items()}
UPDATE = "/update_weights_from_disk"


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """(stub, engine) made with any settings, on version 0; whatever a test did, no update asked for a flush."""
    monkeypatch.setattr(sglang_http, "FIRST_BACKOFF_SECONDS", 0.005)
    with contextlib.ExitStack() as made:

        def make(*, on: int | None = 0, keys=None, engine=None, **stub_settings):
            stub = SglangStub(LAUNCHED, vocab_size=VOCAB, **stub_settings).start()
            made.callback(stub.stop)
            directory = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
            live = engine_on(stub, directory, keys=keys, **(engine or {}))
            made.callback(live.close)
            made.callback(check_bodies, stub)
            if on is not None:
                update(live, anchor(on))
            return stub, live

        yield make


def check_bodies(stub) -> None:
    for body in stub.bodies(UPDATE):
        assert body["flush_cache"] is False and body["abort_all_requests"] is False
        assert body["load_format"] == "auto"


def anchor(version):
    return decode_anchor(TRAINER._anchor(version), version=version)


def delta(version):
    base = TRAINER.weights[version - 1]
    return decode_delta(TRAINER._delta(version), base, base_version=version - 1, version=version)


def update(engine, change) -> None:
    with engine.paused():
        engine.apply(change)
        try:
            engine.verify(change)
        except WeightUpdateError:
            engine.poison()  # as the subscriber does
            raise


def ask(i=0, *, max_tokens=12, **more):
    prompt = tuple((3 * i + j * j + 1) % VOCAB for j in range(6))
    return GenerateRequest(request_id=f"r{i}", token_ids=prompt, max_tokens=max_tokens, **more)


async def sampled(stub, tokens):
    async with asyncio.timeout(30):
        while stub.sampled < tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def arrived(stub, n):
    async with asyncio.timeout(30):
        while len(stub.requests) < n:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def across(stub, engine, change, *, n=4, max_tokens=50):
    """Results of `n` requests that `change` happens to."""
    stub.budget = stub.sampled
    tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=max_tokens))) for i in range(n)]
    await arrived(stub, n)
    stub.budget += 5 * n
    await sampled(stub, stub.budget)
    update(engine, change)
    stub.budget = None
    return await asyncio.gather(*tasks, return_exceptions=True)


def check_forward(result, request, version) -> None:
    """One forward pass with `version` gives these tokens and log-probabilities from the span's start on."""
    span = next(s for s in result.version_spans if s.version == version)
    expected = recomputed(request.token_ids, result.token_ids, TRAINER.hash(version), VOCAB)
    assert (
        list(zip(result.token_ids, result.logprobs, strict=True))[span.start : span.end]
        == (expected[span.start : span.end])
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("incremental", [True, False])
def test_tokens_and_logprobs_are_those_of_the_live_weights(setup, stream, incremental):
    stub, engine = setup(incremental=incremental, engine={"stream": stream})
    for version in (0, 1):
        if version:
            update(engine, delta(1))
        result = asyncio.run(engine.generate(ask(max_tokens=50)))
        check_forward(result, ask(), version)
        assert len(result.token_ids) == 50 and [s.version for s in result.version_spans] == [version]
        assert stub.hash == TRAINER.hash(version) and stub.version == str(version)


def test_in_place_keeps_requests_and_their_keys_and_values(setup):
    stub, engine = setup()
    results = asyncio.run(across(stub, engine, delta(1)))
    for i, result in enumerate(results):
        assert [s.version for s in result.version_spans] == [0, 1] and len(result.token_ids) == 50
        check_forward(result, ask(i), 0)
        with pytest.raises(AssertionError):  # old keys and values under new weights
            check_forward(result, ask(i), 1)


def test_retract_computes_keys_and_values_again(setup):
    stub, engine = setup(radix=False, engine={"pause_mode": "retract"})
    for i, result in enumerate(asyncio.run(across(stub, engine, delta(1)))):
        assert [s.version for s in result.version_spans] == [0, 1] and len(result.token_ids) == 50
        check_forward(result, ask(i), 0)
        check_forward(result, ask(i), 1)


def test_six_requests_live_through_ten_updates_and_every_span_is_of_its_version(setup):
    stub, engine = setup(radix=False, engine={"pause_mode": "retract", "stream": False})

    async def main():
        stub.budget = 0
        tasks = [asyncio.create_task(engine.generate(ask(i, max_tokens=120))) for i in range(6)]
        await arrived(stub, 6)
        for version in range(1, 11):
            stub.budget = stub.sampled + 6 * 5
            await sampled(stub, stub.budget)
            update(engine, delta(version))
            assert stub.hash == engine.weights_hash() == TRAINER.hash(version)
        stub.budget = None
        return await asyncio.gather(*tasks)

    for i, result in enumerate(asyncio.run(main())):
        assert [s.version for s in result.version_spans] == list(range(11))
        for span in result.version_spans:
            check_forward(result, ask(i), span.version)


@pytest.mark.parametrize("spans", [True, False])
def test_abort_ends_requests_with_what_they_have(setup, spans):
    stub, engine = setup(spans=spans, engine={"pause_mode": "abort"})
    for i, result in enumerate(asyncio.run(across(stub, engine, delta(1)))):
        assert result.finish_reason == "abort" and 0 < len(result.token_ids) < 50
        assert [s.version for s in result.version_spans] == [0]
        check_forward(result, ask(i), 0)


def test_nothing_is_sampled_in_a_pause(setup):
    stub, engine = setup()

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=100)))
        await sampled(stub, 5)
        with engine.paused():
            before = stub.sampled
            await asyncio.sleep(0.05)
            assert stub.sampled == before
        return await task

    assert len(asyncio.run(main()).token_ids) == 100


@pytest.mark.parametrize("mode", ["in_place", "abort"])
def test_a_new_request_never_meets_a_cached_prefix_of_old_weights(setup, mode):
    stub, engine = setup(engine={"pause_mode": mode})

    async def main():
        await engine.generate(ask())
        again = await engine.generate(ask())
        check_forward(again, ask(), 0)
        assert stub.cached > 0  # inside a version prefixes are shared
        with engine.paused():
            waiting = asyncio.create_task(engine.generate(ask()))  # sent in the pause, sampled after it
            await asyncio.sleep(0.05)
            engine.apply(delta(1))
        return await waiting, await engine.generate(ask())

    for result in asyncio.run(main()):
        assert [s.version for s in result.version_spans] == [1]
        check_forward(result, ask(), 1)


def test_a_server_without_token_versions_is_believed_only_outside_updates(setup):
    stub, engine = setup(spans=False)

    async def main():
        assert [s.version for s in (await engine.generate(ask())).version_spans] == [0]
        for result in await across(stub, engine, delta(1)):
            assert isinstance(result, EngineError) and "pause_mode" in str(result)
        return await engine.generate(ask())

    result = asyncio.run(main())
    assert [s.version for s in result.version_spans] == [1]
    check_forward(result, ask(), 1)


def test_a_version_without_changes_is_named_by_its_older_name_where_the_server_cannot_tell(setup):
    stub, engine = setup(spans=False)

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=100)))
        await sampled(stub, 5)
        engine.advance(1)
        return await task

    assert [s.version for s in asyncio.run(main()).version_spans] == [0]
    assert engine.version == 1 and stub.version == "1"
    assert stub.bodies("/update_weight_version") == [{"new_version": "1", "abort_all_requests": False}]


def test_a_flush_with_requests_around_ends_the_stubs_scheduler_as_it_does_sglangs(setup):
    stub, engine = setup()
    connection = ServerConnection(stub.url)
    body = {"model_path": str(engine._checkpoint.path), "flush_cache": True, "load_format": "auto"}

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=500)))
        await sampled(stub, 5)
        with engine.paused():
            with pytest.raises(ServerError):
                connection.call("POST", UPDATE, body, seconds=5)
            assert stub.dead
            stub.restart()
        with pytest.raises(EngineError):
            await task

    asyncio.run(main())
    connection.close()
    stub.calls.clear()  # that one was the test's


@pytest.mark.parametrize("fault", ["500", "half", "cut", "lie"])
def test_an_update_that_fails_at_the_server_poisons_and_an_anchor_heals(setup, fault):
    stub, engine = setup()

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=500)))
        await sampled(stub, 5)
        stub.faults[UPDATE].append(fault)
        # "lie": a success that loaded nothing shows in the rows that are read back.
        with pytest.raises(WeightUpdateError if fault == "lie" else EngineError):
            update(engine, delta(1))
        with pytest.raises(EnginePoisonedError):
            await task
        with pytest.raises(EnginePoisonedError):
            await engine.generate(ask())
        assert len(stub.bodies(UPDATE)) == 2  # a load is never asked for twice
        before = stub.sampled
        engine.look()  # the watcher leaves a poisoned engine to its subscriber
        await asyncio.sleep(0.03)
        assert stub.sampled == before  # torn weights sample nothing
        update(engine, anchor(2))
        return await engine.generate(ask())

    result = asyncio.run(main())
    assert [s.version for s in result.version_spans] == [2] and stub.hash == TRAINER.hash(2)
    check_forward(result, ask(), 2)


def test_a_load_that_does_not_end_is_given_up_and_poisons(setup):
    stub, engine = setup(on=None, engine={"load_seconds": 0.2})
    stub.faults[UPDATE].append("hang")
    with pytest.raises(EngineError, match=r"within 0\.2 s"):
        update(engine, anchor(0))
    with pytest.raises(EnginePoisonedError):
        asyncio.run(engine.generate(ask()))


def test_a_subscriber_reloads_from_an_anchor_after_a_torn_update_and_says_so(setup):
    stub, engine = setup(on=None)
    trainer = Trainer(anchor_every=2)
    s = Setup(trainer, engine, first_backoff=0.0)
    s.see(trainer.records[0])
    s.check_live(0)
    stub.faults[UPDATE].append("half")
    s.see(trainer.step())
    assert any(x.state is EngineState.POISONED and "out of memory" in (x.reason or "") for x in s.statuses)
    s.clock.now += 100
    s.see(trainer.step())
    s.check_live(2)
    assert stub.hash == trainer.hash(2) and s.last.state is EngineState.IDLE
    result = asyncio.run(engine.generate(ask()))
    assert [x.version for x in result.version_spans] == [2]


def test_an_update_without_changes_loads_nothing(setup):
    stub, engine = setup(on=None)
    trainer = Trainer()
    s = Setup(trainer, engine)
    s.see(trainer.records[0], trainer.step(empty=True))
    s.settle()
    assert engine.version == 1 and stub.version == "1"
    assert len(stub.bodies(UPDATE)) == 1


def test_a_server_that_was_restarted_with_old_weights_gets_ours_again(setup):
    stub, engine = setup()
    update(engine, delta(1))
    stub.restart()
    assert stub.version == "default" and stub.hash != TRAINER.hash(1)
    engine.look()
    assert stub.version == "1" and stub.hash == TRAINER.hash(1) and engine.version == 1
    check_forward(asyncio.run(engine.generate(ask())), ask(), 1)
    update(engine, delta(2))
    assert stub.hash == TRAINER.hash(2)


def test_tokens_of_a_restarted_server_are_refused_and_wake_the_watcher(setup):
    stub, engine = setup()
    stub.restart()

    async def main():
        with pytest.raises(EnginePoisonedError, match="default"):
            await engine.generate(ask())
        async with asyncio.timeout(20):
            while True:
                try:
                    return await engine.generate(ask())
                except EnginePoisonedError:
                    await asyncio.sleep(0.01)

    result = asyncio.run(main())
    check_forward(result, ask(), 0)
    assert stub.hash == TRAINER.hash(0)


def test_an_operators_pause_is_updated_in_and_renamed_in_from_another_thread(setup):
    stub, engine = setup()
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with engine.paused():
            entered.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert entered.wait(10)
    engine.apply(delta(1))
    engine.advance(2)
    engine.look()
    leave.set()
    holder.join(10)
    assert engine.version == 2 and stub.version == "2" and stub.hash == TRAINER.hash(1)


def test_a_cancelled_request_is_ended_at_the_server(setup):
    stub, engine = setup(engine={"stream": False})

    async def main():
        task = asyncio.create_task(engine.generate(ask(max_tokens=1000)))
        await sampled(stub, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            while not stub.bodies("/abort_request"):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    asyncio.run(main())
    assert stub.bodies("/abort_request")[0]["rid"] == stub.bodies("/generate")[0]["rid"]


def test_top_p_and_top_k_are_refused_because_logprobs_would_be_of_another_distribution(setup):
    _, engine = setup()
    for limit in ({"top_p": 0.9}, {"top_k": 5}):
        with pytest.raises(EngineError, match=r"rollout\.top_p"):
            asyncio.run(engine.generate(ask(**limit)))


def test_keys_are_sent_and_never_shown(setup, caplog):
    _, engine = setup(api_key="s3cret", admin_key="adm1n", keys=Keys("s3cret", "adm1n"))
    check_forward(asyncio.run(engine.generate(ask())), ask(), 0)
    assert "s3cret" not in repr(Keys("s3cret", "adm1n"))
    _, stranger = setup(api_key="s3cret", on=None, keys=Keys("wr0ng"))
    with pytest.raises(EngineError, match="api_key_env") as e:
        update(stranger, anchor(0))
    assert "wr0ng" not in str(e.value) + caplog.text and "s3cret" not in caplog.text


def test_calls_that_do_no_harm_twice_are_repeated_a_bounded_number_of_times(setup):
    stub, engine = setup()
    stub.faults["/pause_generation"].extend(["503", "cut"])
    update(engine, delta(1))
    assert engine.version == 1
    stub.faults["/pause_generation"].extend(["503"] * 4)
    with pytest.raises(EngineError, match="503"):
        update(engine, delta(2))
    assert engine.version == 1
    check_forward(asyncio.run(engine.generate(ask())), ask(), 1)  # and it was started again


def test_a_server_that_cannot_be_started_again_is_paused_and_healed(setup):
    stub, engine = setup()
    stub.faults["/continue_generation"].extend(["503"] * 4)
    with pytest.raises(EngineError, match="503"):
        update(engine, delta(1))

    async def main():
        async with asyncio.timeout(20):
            while True:
                try:
                    return await engine.generate(ask())
                except EnginePoisonedError:
                    await asyncio.sleep(0.01)

    check_forward(asyncio.run(main()), ask(), 1)


def test_a_model_that_cannot_be_read_back_is_trusted_and_said_so(setup, caplog):
    caplog.set_level("INFO")
    stub, engine = setup()
    stub.faults["/get_weights_by_name"].extend(["unreadable"] * 4)
    update(engine, delta(1))
    assert "reads none of the tensors back" in caplog.text


def test_a_server_that_is_gone_is_an_error_that_names_it(setup):
    stub, engine = setup()
    stub.stop()
    with pytest.raises(EngineError, match=stub.address):
        asyncio.run(engine.generate(ask()))
    engine.look()
    assert engine.alive


def test_an_anchor_is_on_disk_before_the_pause(setup):
    _, engine = setup()
    change = anchor(3)
    engine.stage(change)
    files = {p.name for p in engine._checkpoint.path.iterdir()}
    assert files == {"model.safetensors", "model.safetensors.new"}
    assert engine.version == 0 and engine.weights_hash() == TRAINER.hash(0)
    update(engine, change)
    assert engine.weights_hash() == TRAINER.hash(3)
    assert TRAINER.records[3].blobs_of(BlobKind.ANCHOR)
