"""What an SGLang answer says, which version sampled what, the weights' directory, and starting from a configuration."""

import errno
import json
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
from sglang_stub import SglangStub

from headrace.deploy.doctor import diagnose
from headrace.producers.engines import sglang_http
from headrace.producers.engines.protocol import GenerateRequest, VersionSpan
from headrace.producers.engines.role import make_engine
from headrace.producers.engines.sglang_checkpoint import Checkpoint
from headrace.producers.engines.sglang_connect import checkpoint_dir, pause_mode, probe, read_keys
from headrace.producers.engines.sglang_http import Keys, ServerConnection
from headrace.producers.engines.sglang_spans import ForeignVersionError, Lived, attribute
from headrace.producers.engines.sglang_wire import Answer, Sampled, request_body
from headrace.schemas.config import Config, EngineConfig, SglangConfig
from headrace.schemas.config_file import load_config
from headrace.schemas.dtypes import Dtype
from headrace.schemas.errors import ConfigError, EngineError, WeightUpdateError
from headrace.schemas.update import TensorPatch, WeightUpdate
from headrace.schemas.weight_hash import set_hash

REQUEST = GenerateRequest(
    request_id="r", token_ids=(1, 2), max_tokens=5, stop_token_ids=(3,), temperature=0.5
)


def chunk(pairs, total, finish=None, **meta):
    return {
        "meta_info": {
            "output_token_logprobs": [[p, t, None] for p, t in pairs],
            "output_token_logprobs_length": total,
            "completion_tokens": total,
            "finish_reason": finish,
            **meta,
        }
    }


def taken(messages):
    answer = Answer()
    for message in messages:
        answer.take(message)
    return answer.finish()


FIRST, SECOND = (-0.5, 7), (-0.25, 9)
STOP = {"type": "stop", "matched": 9}


@pytest.mark.parametrize("last", [[FIRST, SECOND], [SECOND]])
def test_a_streams_chunks_may_be_cumulative_or_new(last):
    answer = Answer()
    answer.take(chunk([FIRST], 1))
    assert answer.count == 1
    answer.take(chunk(last, 2, STOP, weight_version="4"))
    got = answer.finish()
    assert got.token_ids == (7, 9) and got.logprobs == (-0.5, -0.25)
    assert got.finish_reason == "stop" and got.spans is None and got.version == "4"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([chunk([FIRST], 3, STOP)], "lost tokens"),
        ([chunk([], 0, {"type": "abort", "message": "Aborted by AbortReq."})], "Aborted by"),
        ([chunk([FIRST], 1)], "no end"),
        ([chunk([(float("nan"), 7)], 1, STOP)], "not finite"),
        ([chunk([(None, 7)], 1, STOP)], "not as SGLang"),
        ([{"text": "x"}], "no meta_info"),
        ([["x"]], "no meta_info"),
        ([chunk([FIRST], 1, STOP, weight_versions=[{"version": "1"}])], "not as SGLang"),
        ([chunk([FIRST], 1, STOP, completion_tokens=2)], "counts 2"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_that_says_why(messages, why):
    with pytest.raises(EngineError, match=why):
        taken(messages)


def test_a_request_states_every_setting_that_a_server_might_have_another_default_for():
    body = request_body(REQUEST, rid="x-1", max_tokens=5, cache_key="k", stream=False)
    sampling = body["sampling_params"]
    assert sampling["temperature"] == 0.5 and sampling["top_p"] == 1.0 and sampling["top_k"] == -1
    assert sampling["min_p"] == 0.0 and sampling["repetition_penalty"] == 1.0
    assert sampling["stop_token_ids"] == [3] and "ignore_eos" not in sampling  # which would ignore those too
    assert body["return_logprob"] is True and body["extra_key"] == "k" and body["input_ids"] == [1, 2]


def lived(oldest=2, admitted=3, newest=5, *, crossed=True, aborting=False):
    return Lived(oldest=oldest, admitted=admitted, newest=newest, crossed=crossed, aborting=aborting)


def sampled(spans, version="5", count=4):
    return Sampled(
        token_ids=(1,) * count, logprobs=(-1.0,) * count, finish_reason="stop", spans=spans, version=version
    )


def test_the_servers_own_spans_are_taken_over():
    spans = attribute(sampled((("3", 0, 1), ("5", 1, 4))), lived())
    assert spans == (VersionSpan(version=3, start=0, end=1), VersionSpan(version=5, start=1, end=4))
    # A server that was not told of a version without changes names the one before.
    assert attribute(sampled((("2", 0, 4),)), lived())[0].version == 2


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ((("3", 0, 1), ("5", 2, 4)), "tile"),
        ((("3", 0, 2), ("5", 1, 4)), "tile"),
        ((("3", 0, 3),), "tile"),
        ((("3", 0, 5),), "tile"),
        ((("5", 0, 1), ("3", 1, 4)), "go back"),
    ],
)
def test_spans_that_cannot_be_are_refused(spans, why):
    with pytest.raises(EngineError, match=why):
        attribute(sampled(spans), lived())


@pytest.mark.parametrize("version", ["default", "1", "6", "-3", "", "３x"])
def test_a_version_that_was_not_live_is_foreign(version):
    with pytest.raises(ForeignVersionError):
        attribute(sampled(((version, 0, 4),)), lived())
    with pytest.raises(ForeignVersionError):
        attribute(sampled(None, version), lived(crossed=False))


def test_one_version_for_a_whole_answer_counts_only_where_it_must_be_true():
    assert attribute(sampled(None, "4"), lived(crossed=False))[0].version == 3
    assert attribute(sampled(None, "5"), lived(aborting=True))[0].version == 5
    with pytest.raises(EngineError, match="crossed an update"):
        attribute(sampled(None, "5"), lived())
    with pytest.raises(EngineError, match="weight_version"):
        attribute(sampled(None, None), lived(crossed=False))


def patch(name, bits, dtype=Dtype.BF16, indices=None, shape=None):
    bits = np.asarray(bits, dtype=dtype.bits)
    return TensorPatch(
        name=name,
        shape=shape or bits.shape,
        indices=None if indices is None else np.asarray(indices),
        bits=bits.reshape(-1),
        dtype=dtype,
    )


ANCHOR = WeightUpdate(
    version=0,
    weights_hash=0,
    patches=(
        patch("odd", [1, 2, 3]),
        patch("half", [[4, 5], [6, 7]], Dtype.FP16),
        patch("wide", [8, 2**31], Dtype.FP32),
    ),
)


def on_disk(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    found = safetensors.deserialize((path / "model.safetensors").read_bytes())
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in found}


def test_the_file_is_one_that_any_tool_reads_in_every_number_format(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.check(ANCHOR)
    checkpoint.write(ANCHOR)
    assert on_disk(tmp_path / "c") == {
        "odd": ("BF16", [3], np.array([1, 2, 3], np.uint16).tobytes()),
        "half": ("F16", [2, 2], np.array([4, 5, 6, 7], np.uint16).tobytes()),
        "wide": ("F32", [2], np.array([8, 2**31], np.uint32).tobytes()),
    }


def test_a_delta_changes_what_it_names_in_the_file(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.write(ANCHOR)
    delta = WeightUpdate(
        version=1,
        base_version=0,
        weights_hash=0,
        patches=(patch("half", [99], Dtype.FP16, indices=[2], shape=(2, 2)),),
    )
    checkpoint.check(delta)
    assert checkpoint.differs(delta) == "half"
    checkpoint.write(delta)
    assert checkpoint.differs(delta) is None
    assert on_disk(tmp_path / "c")["half"][2] == np.array([4, 5, 99, 7], np.uint16).tobytes()
    weights = {name: checkpoint.bits(name) for name in checkpoint.shapes}
    assert checkpoint.hash() == set_hash(
        weights, dtypes={"odd": Dtype.BF16, "half": Dtype.FP16, "wide": Dtype.FP32}
    )
    with pytest.raises(WeightUpdateError) as e:
        checkpoint.check(
            WeightUpdate(
                version=2, base_version=1, weights_hash=0, patches=(patch("half", [[1, 2], [3, 4]]),)
            )
        )
    assert e.value.reason == "dtype"


def test_a_new_anchor_is_a_new_file_so_that_a_late_reader_keeps_the_old_one(tmp_path):
    checkpoint = Checkpoint(tmp_path / "c")
    checkpoint.write(ANCHOR)
    with (tmp_path / "c" / "model.safetensors").open("rb") as late:
        before = late.read()
        checkpoint.write(
            WeightUpdate(version=5, weights_hash=0, patches=(*ANCHOR.patches[1:], patch("odd", [7, 7, 7])))
        )
        late.seek(0)
        assert late.read() == before
    assert on_disk(tmp_path / "c")["odd"][2] == np.array([7, 7, 7], np.uint16).tobytes()


def test_config_and_tokenizer_come_along_and_old_weights_do_not(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "x.bin",
    ):
        (model / name).write_text("{}")
    checkpoint = Checkpoint(tmp_path / "c", model)
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"config.json", "tokenizer.json"}
    checkpoint.remove()
    assert not (tmp_path / "c").exists()


def test_a_weights_directory_that_leads_elsewhere_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.safetensors").write_text("precious")
    (tmp_path / "c").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="somebody else"):
        Checkpoint(tmp_path / "c")
    assert (tmp_path / "elsewhere" / "model.safetensors").read_text() == "precious"


def test_a_full_disk_is_an_error_that_says_what_to_set(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"No space left.*engine\.sglang\.checkpoint_dir"):
        Checkpoint(tmp_path / "c").write(ANCHOR)


def config(tmp_path, url=None, *, model=True, sglang=None, **engine) -> Config:
    directory = tmp_path / "model"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 37, "max_position_embeddings": 64}))
    settings = SglangConfig(checkpoint_dir=tmp_path / "weights", **(sglang or {}))
    return Config(
        run={"dir": tmp_path / "run"},
        policy={"model": directory if model else None},
        engine=EngineConfig(kind="sglang", url=url, sglang=settings, **engine),
    )


@pytest.fixture
def stub():
    made = SglangStub({"a": np.zeros(3, np.uint16)}, vocab_size=37, old_paths=True).start()
    yield made
    made.stop()


def test_the_role_makes_an_engine_for_a_server_of_an_older_release(tmp_path, stub):
    engine = make_engine(config(tmp_path, stub.url), "engine-0")
    try:
        assert engine.version == -1 and engine.vocab_size == 37 and engine.logprobs_mode == "processed"
        assert len(list((tmp_path / "weights").iterdir())) == 1
    finally:
        engine.close()
    assert not list((tmp_path / "weights").iterdir())


def test_a_server_that_is_not_there_is_named(tmp_path, stub, monkeypatch):
    monkeypatch.setattr(sglang_http, "FIRST_BACKOFF_SECONDS", 0.005)
    stub.stop()
    with pytest.raises(EngineError, match=stub.address) as e:
        make_engine(config(tmp_path, stub.url), "engine-0")
    assert not isinstance(e.value, ConfigError)  # a supervisor tries again: servers take minutes to start


def test_doctor_says_what_the_server_is(tmp_path, stub):
    assert probe(config(tmp_path, stub.url)) == "SGLang 0.5.99, weight version 'default'"


def test_doctor_says_whether_the_kind_of_engine_can_run(tmp_path, stub, monkeypatch):
    found = {f.check: f for f in diagnose(config(tmp_path, stub.url))}
    assert found["engine"].level == "ok" and stub.url in found["engine"].detail
    url = stub.url
    stub.stop()
    found = {f.check: f for f in diagnose(config(tmp_path, url))}
    assert found["engine"].level == "error" and url in found["engine"].detail
    gone = Config(engine=EngineConfig(kind="vllm", url=url))
    assert "nothing accepts" in {f.check: f for f in diagnose(gone)}["engine"].detail
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = {f.check: f for f in diagnose(Config(engine=EngineConfig(kind="vllm")))}
    assert found["engine"].level == "error" and "deploy/vllm/install" in found["engine"].detail
    assert found["vllm"].level == "note"
    assert {f.check: f for f in diagnose(Config())}["engine"].level == "ok"


def test_one_server_has_one_driver(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.count must be 1"):
        load_config(overrides={"engine.url": "http://127.0.0.1:1", "engine.count": 2})


def test_recompute_needs_a_server_without_radix_cache(tmp_path, stub):
    wanted = config(tmp_path, stub.url, kv_policy="recompute")
    assert pause_mode(wanted) == "retract"
    for start in (lambda: make_engine(wanted, "e"), lambda: probe(wanted)):
        with pytest.raises(ConfigError, match="--disable-radix-cache"):
            start()


def test_settings_that_cannot_work_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"engine\.url is not set"):
        make_engine(config(tmp_path), "e")
    with pytest.raises(ConfigError, match=r"policy\.model is not set"):
        make_engine(config(tmp_path, "http://127.0.0.1:9", model=False), "e")
    with pytest.raises(ConfigError, match="use pause_mode"):
        pause_mode(config(tmp_path, kv_policy="recompute", sglang={"pause_mode": "in_place"}))
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        read_keys(SglangConfig(api_key_env="NO_SUCH_KEY"), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(SglangConfig(admin_key_file=tmp_path / "none"))
    for url in ("ftp://h", "127.0.0.1:3000", "http://key@host:1"):
        with pytest.raises(ConfigError, match=r"engine\.url"):
            load_config(overrides={"engine.url": url})
    with pytest.raises(ConfigError, match="not both"):
        load_config(overrides={"engine.sglang.api_key_env": "A", "engine.sglang.api_key_file": "b"})


def test_keys_come_from_the_environment_or_a_file_without_their_line_end(tmp_path):
    (tmp_path / "key").write_text("admin\n")
    keys = read_keys(SglangConfig(api_key_env="K", admin_key_file=tmp_path / "key"), {"K": "api"})
    assert (keys.api, keys.admin) == ("api", "admin")
    (tmp_path / "key").write_text("two\nlines")
    with pytest.raises(ConfigError, match="header cannot hold") as e:
        read_keys(SglangConfig(api_key_file=tmp_path / "key"))
    assert "lines" not in str(e.value)


@pytest.mark.parametrize(
    "answer", [b"HTTP/9 nonsense\r\n\r\n", b"HTTP/1.1 500 no\r\n\r\nyour key s3cret is wrong"]
)
def test_no_error_repeats_a_key(answer):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with listening.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        connection = ServerConnection(f"http://127.0.0.1:{listening.getsockname()[1]}", Keys("s3cret"))
        with pytest.raises(EngineError) as e:
            connection.call("GET", "/model_info", seconds=5)
        connection.close()
        server.join(10)
    assert "s3cret" not in str(e.value) + repr(e.value)


def test_runs_do_not_share_a_weights_directory(tmp_path):
    one, two = config(tmp_path), Config(run={"dir": tmp_path / "other"})
    assert checkpoint_dir(one, "e-0") != checkpoint_dir(one, "e-1")
    assert checkpoint_dir(one, "e-0").name != checkpoint_dir(two, "e-0").name
    assert checkpoint_dir(one, "../e").parent == tmp_path / "weights"
