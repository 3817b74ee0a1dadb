"""`headrace feedback send`: what is typed becomes an event, or an error that says where and how to mend it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from streams_records import take
from streams_workers import config_for
from typer.testing import CliRunner

from headrace.deploy.broker.launcher import Broker
from headrace.deploy.cli import app
from headrace.deploy.feedback_input import event_ms, feedback_of, read_lines
from headrace.schemas.config_file import dump_config
from headrace.schemas.errors import ConfigError
from headrace.schemas.feedback import FEEDBACK
from headrace.schemas.topics import FEEDBACK as FEEDBACK_TOPIC
from headrace.schemas.topics import Topics


def test_a_row_becomes_an_event() -> None:
    row = {"rollout": "r", "name": "accepted", "value": True, "event_time": 1_700_000_000_000, "id": "f"}
    found = feedback_of(row | {"metadata": {"who": "reviewer"}}, where="x")
    assert (found.feedback_id, found.rollout_id, found.name, found.value) == ("f", "r", "accepted", 1.0)
    assert (found.event_ms, found.metadata) == (1_700_000_000_000, '{"who": "reviewer"}')


def test_an_event_without_an_id_gets_its_own() -> None:
    row = {"rollout": "r", "value": 1}
    assert feedback_of(row, where="x").feedback_id != feedback_of(row, where="x").feedback_id


def test_times_are_read_with_their_zone() -> None:
    assert event_ms("2023-11-14T23:13:20+01:00", where="x") == 1_700_000_000_000
    with pytest.raises(ConfigError, match="zone"):
        event_ms("2023-11-14T22:13:20", where="x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "write a JSON object"),
        ('{"rollout": "r", "valeu": 1}', "unknown key 'valeu'"),
        ('{"rollout": "", "value": 1}', "rollout is ''"),
        ('{"rollout": "r"}', "value is None"),
        ('{"rollout": "r", "value": NaN}', "value_not_finite"),
        ('{"rollout": "r", "value": 1, "metadata": "nope"}', "metadata"),
        ('{"rollout": "r", "value": 1, "event_time": "soon"}', "event time 'soon'"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.jsonl"
    path.write_text('{"rollout": "r", "value": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as e:
        read_lines(path)
    assert "line 2" in str(e.value)


def test_the_command_sends_keyed_by_rollout(embedded_broker: Broker, namespace: str, tmp_path: Path) -> None:
    config = config_for(embedded_broker.config, namespace, tmp_path, feedback={"enabled": True})
    dump_config(config, tmp_path / "c.json")

    def send(*args: str, text: str | None = None) -> Any:
        command = ["feedback", "send", "-c", str(tmp_path / "c.json"), "--json", *args]
        result = CliRunner().invoke(app, command, input=text, catch_exceptions=False)
        return json.loads(result.stdout)

    assert send("--rollout", "r", "--name", "accepted", "--value", "-1", "--id", "f") == {
        "sent": 1,
        "feedback_ids": ["f"],
    }
    lines = '{"rollout": "a", "value": 1, "id": "g"}\n\n{"rollout": "b", "value": 0, "id": "h"}\n'
    assert send("--file", "-", text=lines)["feedback_ids"] == ["g", "h"]
    records = take(config.kafka, Topics(namespace).name(FEEDBACK_TOPIC), 3)
    found = {r.key: FEEDBACK.decode(r.value, r.headers) for r in records}
    assert {k: (f.name, f.value) for k, f in found.items()} == {
        b"r": ("accepted", -1.0),
        b"a": ("reward", 1.0),
        b"b": ("reward", 0.0),
    }
