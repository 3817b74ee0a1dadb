"""The gateway's spool, and which rollouts are open, without a network."""

import gzip
import json

import numpy as np
import pytest
import zstandard
from gateway_http_kit import HTTP, running
from gateway_kit import END, ids, result, said, session, user
from gateway_kit import call as conversation

from headrace.producers.gateway.capture import Sampled
from headrace.producers.gateway.errors import RequestError
from headrace.producers.gateway.limits import Limits
from headrace.producers.gateway.rollouts import Rollouts
from headrace.producers.gateway.spool import Spool
from headrace.schemas.errors import ConfigError

HI = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def finished(rollout_id: str, answers: int = 2):
    """The trajectories of a rollout with some answers to one prompt."""
    s = session(rollout_id=rollout_id)
    plan = s.begin(conversation(user("hi")))
    s.commit(plan, [Sampled(result=result([*ids("ok"), END]), answer=said("ok"))] * answers)
    return s.finish()


def test_what_was_written_is_there_again_and_goes_when_all_of_it_is_acknowledged(tmp_path) -> None:
    first = Spool(tmp_path / "spool", most_bytes=1 << 20)
    rows = finished("r")
    first.add("r", first.write(rows, now_ms=5))
    assert (len(first), first.waiting("r"), first.oldest_ms()) == (1, 2, 5)
    second = Spool(tmp_path / "spool", most_bytes=1 << 20)
    again = second.recover()
    assert [t.trajectory_id for t in again] == [t.trajectory_id for t in rows]
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(again, rows, strict=True))
    second.acknowledged(again[0])
    assert (second.waiting("r"), len(list(tmp_path.glob("spool/*")))) == (1, 1)
    second.acknowledged(again[1])
    assert (second.size, list(tmp_path.glob("spool/*"))) == (0, [])


def test_torn_files_are_removed_and_damaged_ones_put_aside(tmp_path) -> None:
    spool = Spool(tmp_path, most_bytes=1 << 20)
    spool.write(finished("good"), now_ms=0)
    path = spool.write(finished("bad"), now_ms=0).path
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "torn.tmp").write_bytes(b"half")
    again = Spool(tmp_path, most_bytes=1 << 20)
    assert {t.rollout_id for t in again.recover()} == {"good"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.broken", "good.rollout"]


def test_a_full_spool_says_why(tmp_path) -> None:
    spool = Spool(tmp_path, most_bytes=1)
    assert spool.full() is None
    spool.add("r", spool.write(finished("r"), now_ms=0))
    assert "1 finished rollouts" in (spool.full() or "")


def test_a_folder_that_cannot_be_used_is_a_mistake_of_the_configuration(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="spool_dir"):
        Spool(tmp_path / "file", most_bytes=1)


def test_idle_rollouts_end_and_empty_ones_are_forgotten() -> None:
    now = [0.0]
    rollouts = Rollouts(lambda i, n, raw: session(rollout_id=i), clock=lambda: now[0])
    ask = conversation(user("hi"))
    used = rollouts.of_request("t", "a", ask, b"1", again=False)
    busy = rollouts.of_request("t", "b", ask, b"1", again=False)
    rollouts.of_request("t", "c", ask, b"1", again=False)
    for r in (used, busy):
        r.session.commit(r.session.begin(ask), [Sampled(result=result([END]), answer=said(""))])
    busy.requests = 1
    assert rollouts.idle(10) == []
    now[0] = 10.0
    assert rollouts.idle(10) == [used]
    assert len(rollouts) == 2
    rollouts.finish(used)
    assert rollouts.of_request("t", "a", ask, b"1", again=False) is not used
    assert rollouts.get(busy.id, "other") is None


def test_more_rollouts_than_may_be_open_are_refused() -> None:
    rollouts = Rollouts(lambda i, n, raw: session(rollout_id=i), most=1)
    rollouts.of_request("t", "a", conversation(user("hi")), b"", again=False)
    with pytest.raises(RequestError) as caught:
        rollouts.of_request("t", "b", conversation(user("hi")), b"", again=False)
    assert caught.value.status == 503


def test_compressed_bodies_within_the_limit() -> None:
    plain = json.dumps(HI).encode()
    bomb = gzip.compress(b" " * 100_000)
    with running("ok", limits=Limits(body_bytes=20_000)) as (gateway, _):
        for encoding, body, status in (
            ("gzip", gzip.compress(plain), 200),
            ("zstd", zstandard.compress(plain), 200),
            ("identity", plain, 200),
            ("gzip", bomb, 413),
            ("zstd", zstandard.compress(b" " * 100_000), 413),
            ("gzip", plain, 400),
            ("zstd", plain, 400),
            ("br", plain, 415),
        ):
            answer = HTTP.post(
                gateway.url + "/v1/chat/completions", content=body, headers={"content-encoding": encoding}
            )
            assert (answer.status_code, encoding) == (status, encoding), answer.text
