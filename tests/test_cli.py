"""The command line: quick help, clear errors without tracebacks, JSON where it reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deploy.broker.launcher import Broker

HEADRACE = [sys.executable, "-m", "headrace.deploy.cli"]
HEAVY = ("torch", "transformers", "pyarrow", "faust", "kafka", "aiokafka", "pydantic", "matplotlib", "numpy")


def headrace(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "KAFKA_HOME"} | env
    return subprocess.run(
        [*HEADRACE, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_line_imports_nothing_heavy() -> None:
    code = f"import sys, headrace.deploy.cli; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_lists_every_command(tmp_path: Path) -> None:
    done = headrace("--help", cwd=tmp_path)
    assert done.returncode == 0
    commands = "demo up init broker engine streams rollout gateway train topics status top deadletters doctor"
    for command in commands.split():
        assert f" {command} " in done.stdout, command
        assert headrace(command, "--help", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["up"], "rollout.tasks is not set"),
        (["up", "--set", "rollout.workers=0"], "set gateway.enabled = true"),
        (["up", "--set", "rollout.workers=0", "--set", "gateway.enabled=true"], "policy.model"),
        (["up", "-c", "none.toml"], "none.toml does not exist"),
        (["up", "-c", "lagg.toml"], "did you mean staleness.max_lag?"),
        (["engine", "--set", "engine.prot=1"], "did you mean engine.port?"),
        (["train", "--set", "nonsense"], "write it as key=value"),
        (["demo", "--task", "chess"], "calculator and addition"),
        (["demo", "--run-dir", "lagg.toml/x"], "cannot be made"),
        (["demo", "--bootstrap", "127.0.0.1:notaport"], "write host:port[,host:port]"),
        (["up", "--bootstrap", "nonsense"], "write host:port[,host:port]"),
        (["status"], "no run to look at"),
        (["status", "--run-dir", "nowhere"], "nowhere holds no run"),
        (["broker", "run", "--kind", "kafka"], "set KAFKA_HOME"),
        (["broker", "run", "--kind", "rabbit"], "kafka.broker = 'rabbit'"),
    ],
)
def test_what_the_user_got_wrong_is_one_message_and_status_2(
    tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "lagg.toml").write_text("[staleness]\nmax_lagg = 4\n")
    done = headrace(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr and message in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_a_broker_that_does_not_answer_is_status_1(tmp_path: Path) -> None:
    done = headrace("status", "--set", "kafka.bootstrap=127.0.0.1:9", cwd=tmp_path)
    assert done.returncode == 1
    assert "no Kafka broker answers at 127.0.0.1:9" in done.stderr and "Traceback" not in done.stderr


def test_reports_come_as_json(embedded_broker: Broker, namespace: str, tmp_path: Path) -> None:
    at = ["--set", f"kafka.bootstrap={embedded_broker.bootstrap}", "--set", f"run.namespace={namespace}"]

    def report(*args: str) -> dict:
        done = headrace(*args, *at, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert len(report("topics", "create")["created"]) == 9
    assert report("topics", "create")["created"] == []
    assert {t["records"] for t in report("topics", "ls")["topics"]} == {0}
    assert set(report("status")["stages"]) == {"verify", "advantage", "trainer", "engines"}
    assert report("deadletters", "ls") == {"deadletters": []}
    assert report("doctor")["ok"] is True


def test_dead_letters_tell_where_from_and_why(
    embedded_broker: Broker, namespace: str, tmp_path: Path
) -> None:
    from headrace.schemas.deadletter import DeadLetter, dead_letter_headers
    from headrace.schemas.topics import DEADLETTERS, Topics
    from headrace.streams.kafka import closing, create_topics, make_producer

    topics = Topics(namespace)
    create_topics(embedded_broker.config, topics, ["policy"])
    letter = DeadLetter(
        stage="verify", topic="t", partition=3, offset=7, reason="not_arrow", detail="d", at_ms=1
    )
    with closing(make_producer(embedded_broker.config, client_id="test")) as producer:
        for _ in range(3):
            producer.send(topics.name(DEADLETTERS), b"x", headers=dead_letter_headers([], letter)).get(10)
    at = ["--set", f"kafka.bootstrap={embedded_broker.bootstrap}", "--set", f"run.namespace={namespace}"]
    done = headrace("deadletters", "ls", "--limit", "2", "--json", *at, cwd=tmp_path)
    letters = json.loads(done.stdout)["deadletters"]
    assert [(x["offset"], x["topic"], x["source_offset"], x["reason"]) for x in letters] == [
        (1, "t", 7, "not_arrow"),
        (2, "t", 7, "not_arrow"),
    ]


def test_a_broker_in_the_foreground_ends_with_ctrl_c(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*HEADRACE, "broker", "run", "--kind", "embedded", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        pid = json.loads(process.stdout.readline())["pid"]
        os.kill(pid, 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
