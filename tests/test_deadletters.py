"""Dead letters: what is kept of a record, and what a person can do with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from streams_records import take
from typer.testing import CliRunner

from headrace.deploy.cli import app
from headrace.deploy.commands_letters import hex_lines, moment_ms, print_letters
from headrace.schemas.codec import header
from headrace.schemas.config import Config
from headrace.schemas.deadletter import (
    REQUEUES,
    SETTLED,
    SETTLES,
    TRUNCATED,
    DeadLetter,
    OpenLetters,
    dead_letter_record,
    original_headers,
    read_dead_letter,
    requeues_of,
)
from headrace.schemas.errors import ConfigError
from headrace.schemas.topics import DEADLETTERS, SCORES, TRAJECTORIES, Topics
from headrace.streams.kafka import closing, create_topics, make_producer
from headrace.streams.letterbox import Letter, Wanted, open_letterbox

ODD = [("x", b"\xff\xfe"), ("y", b"")]


def a_letter(topic: str = "t", **other: Any) -> DeadLetter:
    fields: dict[str, Any] = {
        **{"stage": "verify", "topic": topic, "partition": 0, "offset": 0},
        **{"reason": "not_arrow", "detail": "why", "at_ms": 5},
    }
    return DeadLetter(**{**fields, **other})


def test_a_letter_keeps_every_byte() -> None:
    key, value, headers = dead_letter_record(b"\xff", b"\x00\xff", ODD, a_letter())
    assert (key, value, original_headers(headers)) == (b"\xff", b"\x00\xff", ODD)
    assert read_dead_letter(headers) == a_letter()


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [(b"k", b"v" * 200_000, ODD), (b"k" * 200_000, None, ODD), (b"k", b"v", [("h", b"x" * 200_000), *ODD])],
)
def test_a_letter_that_would_not_fit_is_cut_and_says_where_the_original_lies(
    key: bytes, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    short_key, short_value, ours = dead_letter_record(key, value, headers, a_letter(offset=7), limit=100_000)
    assert len(short_key or b"") + len(short_value or b"") + sum(len(v) for _, v in ours) < 50_000
    assert header(ours, TRUNCATED) == str(len(value or b""))
    assert read_dead_letter(ours).offset == 7
    assert [h for h in original_headers(ours) if h in ODD] == ODD


def test_the_counter_of_requeues_outlives_the_next_letter() -> None:
    _, _, headers = dead_letter_record(b"", b"", [(REQUEUES, b"2")], a_letter())
    assert requeues_of(headers) == 2
    assert requeues_of([(REQUEUES, b"many")]) == 0


def test_moments() -> None:
    assert moment_ms("2h", 10_000.0, option="--since") == (10_000 - 7200) * 1000
    with pytest.raises(ConfigError, match=r"--since 'soon'.*30m"):
        moment_ms("soon", 0.0, option="--since")


def test_a_dump_shows_offsets_bytes_and_text() -> None:
    assert hex_lines(b"ab\xff")[0].split() == ["000000", "61", "62", "ff", "ab."]
    assert hex_lines(b"x" * 300, rows=1)[-1].strip() == "... 284 more bytes"


def put(config: Config, topic: str, key: Any, value: Any, headers: Any) -> int:
    with closing(make_producer(config.kafka, client_id="test")) as producer:
        return int(producer.send(topic, value, key=key, headers=headers, partition=0).get(30).offset)


@pytest.fixture
def config(broker: Any, namespace: str) -> Config:
    made = Config.model_validate({"run": {"namespace": namespace}, "kafka": broker.config.model_dump()})
    create_topics(made.kafka, Topics(namespace), [made.policy.id])
    return made


def test_requeue_sends_the_original_bytes_once_and_settles_the_letter(config: Config) -> None:
    topics = Topics(config.run.namespace)
    name, letters = topics.name(TRAJECTORIES), topics.name(DEADLETTERS)
    number = put(config, letters, *dead_letter_record(b"\xff", b"\x00v", ODD, a_letter(name)))
    with open_letterbox(config) as box:
        chosen = [i for i in box.letters() if Wanted(topic="trajectories", reason="not_arrow").takes(i)]
        assert [d.done for d in box.requeue(chosen, limit=3)] == [True]
        assert [(i.number, i.settled) for i in box.letters()] == [(number, "requeued")]
        assert [d.done for d in box.requeue(chosen, limit=3)] == [False]
    (again,) = take(config.kafka, name, 1)
    assert (again.key, again.value) == (b"\xff", b"\x00v")
    assert list(again.headers) == [*ODD, (REQUEUES, b"1")]
    second = put(config, letters, *dead_letter_record(again.key, again.value, again.headers, a_letter(name)))
    with open_letterbox(config) as box:
        chosen = [i for i in box.letters() if i.number == second]
        (refused,) = box.requeue(chosen, limit=1)
        assert not refused.done and "--force" in refused.note
        assert [d.done for d in box.requeue(chosen, limit=1, force=True)] == [True]


def test_a_cut_letter_is_requeued_from_the_original_while_that_is_kept(config: Config) -> None:
    topics = Topics(config.run.namespace)
    name, letters = topics.name(SCORES), topics.name(DEADLETTERS)
    value = b"v" * 200_000
    at = put(config, name, b"k", value, ODD)
    for offset in (at, 99):
        put(
            config,
            letters,
            *dead_letter_record(b"k", value, ODD, a_letter(name, offset=offset), limit=100_000),
        )
    with open_letterbox(config) as box:
        kept, gone = box.requeue(box.letters(), limit=3)
        assert kept.done
        assert not gone.done and f"{name} partition 0 offset 99" in gone.note
    assert [r.value for r in take(config.kafka, name, 2)] == [value, value]


def test_the_commands_list_show_drop_and_refuse(config: Config) -> None:
    topics = Topics(config.run.namespace)
    letter = dead_letter_record(b"k", b"\x00bad", ODD, a_letter(topics.name(TRAJECTORIES)))
    number = put(config, topics.name(DEADLETTERS), *letter)
    sets = [
        "--set",
        f"run.namespace={config.run.namespace}",
        "--set",
        f"kafka.bootstrap={config.kafka.bootstrap}",
    ]

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, ["deadletters", *words, *sets])

    assert "not_arrow" in run("ls").stdout
    assert json.loads(run("ls", "--json", "--stage", "trainer").stdout) == {"deadletters": []}
    shown = run("show", str(number)).stdout
    assert "00 62 61 64" in shown and "requeue" in shown
    assert isinstance(run("drop").exception, ConfigError)
    assert isinstance(run("drop", "77").exception, ConfigError)
    assert run("drop", str(number)).exit_code == 0
    assert json.loads(run("ls", "--json").stdout) == {"deadletters": []}
    assert json.loads(run("ls", "--json", "--all").stdout)["deadletters"][0]["settled"] == "dropped"
    assert run("drop", str(number)).exit_code == 1


@pytest.mark.parametrize("width", [80, 110, 200])
def test_the_list_is_legible_in_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    letter = a_letter(
        "my-run.trajectories", offset=1234, detail="ArrowInvalid: Expected to read 16 " + "x" * 90
    )
    item = Letter(number=12, letter=letter, requeues=2, truncated=True, size=5, settled="requeued")
    print_letters([item], True)
    lines = capsys.readouterr().out.splitlines()
    for whole in ("12", "01-01", "verify", "my-run.trajectories/0/1234", "requeued", "not_arrow"):
        assert whole in lines[1]
    assert all(len(line) <= width for line in lines) and len(lines) <= 20
    assert "(cut)(requeued2times)" in "".join("".join(lines).split())


def test_letters_are_open_until_a_marker_settles_them() -> None:
    found = OpenLetters()
    for offset, headers in [
        (0, []),
        (1, [("headrace-dlq-reason", b"x")]),
        (2, [(SETTLED, b"dropped"), (SETTLES, b"0")]),
        (4, [(SETTLED, b"requeued"), (SETTLES, b"1")]),
        (5, []),
        (6, [(SETTLES, b"not a number")]),
    ]:
        found.take(offset, headers)
    assert len(found) == 2
