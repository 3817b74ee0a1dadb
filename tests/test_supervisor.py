"""The supervisor with small fake roles: restarts, giving up, stop order, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.deploy.restart_file import read_restarts, restarts_text, write_restarts
from headrace.deploy.restarts import CONFIG, FENCED, WATCHDOG, RestartCause, RestartRule, RestartState
from headrace.deploy.supervisor import RoleFailedError, RoleSpec, RoleState, Supervisor
from headrace.streams import metrics

QUICK = RestartRule(first_delay_s=0.01, limit=3)

SLEEPER = """
import signal, sys, time
def end(*_):
    open("order", "a").write(sys.argv[1] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(sys.argv[1] + ".up", "w").close()
while True: time.sleep(60)
"""
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("child", "w").write(str(child.pid))
open(sys.argv[1] + ".up", "w").close()
while True: time.sleep(60)
"""


def wait_for(condition: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z" if Path("/proc").exists() else True
    except FileNotFoundError:
        return False


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def role(here: Path, name: str, code: str, **settings) -> RoleSpec:
    argv = [sys.executable, "-c", textwrap.dedent(code), name]
    return RoleSpec(name=name, argv=argv, log=here / "logs" / f"{name}.log", **settings)


def run_until(supervisor: Supervisor, condition: Callable[[], object]) -> None:
    def step() -> object:
        supervisor.check()
        return condition()

    wait_for(step)


def test_roles_stop_in_the_given_order(here: Path) -> None:
    supervisor = Supervisor()
    for order, name in [(2, "trainer"), (0, "rollout"), (1, "engine")]:
        supervisor.start(role(here, name, SLEEPER, stop_order=order))
    wait_for(lambda: all((here / f"{n}.up").exists() for n in ("trainer", "rollout", "engine")))
    supervisor.stop()
    assert (here / "order").read_text().split() == ["rollout", "engine", "trainer"]
    assert {r.state for r in supervisor.roles} == {RoleState.STOPPED}
    supervisor.stop()


def test_a_role_that_ignores_sigterm_is_killed_with_its_children(here: Path) -> None:
    supervisor = Supervisor()
    supervisor.start(role(here, "stubborn", STUBBORN, grace_s=0.1))
    wait_for((here / "stubborn.up").exists)
    supervisor.stop()
    assert supervisor.roles[0].process.returncode == -signal.SIGKILL
    wait_for(lambda: not alive(int((here / "child").read_text())))


def test_hurry_kills_at_once(here: Path) -> None:
    supervisor = Supervisor()
    supervisor.start(role(here, "stubborn", STUBBORN, grace_s=3600))
    wait_for((here / "stubborn.up").exists)
    supervisor.stop(hurry=lambda: True)
    assert not alive(supervisor.roles[0].process.pid)


def test_a_role_that_dies_is_started_again(here: Path) -> None:
    code = """
    import pathlib, sys, time
    if not pathlib.Path("once").exists():
        pathlib.Path("once").touch()
        sys.exit(1)
    pathlib.Path("second").touch()
    time.sleep(60)
    """
    supervisor = Supervisor(rule=QUICK)
    supervisor.start(role(here, "fragile", code))
    run_until(supervisor, (here / "second").exists)
    assert supervisor.roles[0].restarts.total == 1
    supervisor.stop()


def test_a_role_that_keeps_dying_is_given_up_with_the_end_of_its_log(here: Path) -> None:
    supervisor = Supervisor(rule=QUICK)
    supervisor.start(role(here, "doomed", "import sys; print('the reason'); sys.exit(9)"))
    with pytest.raises(RoleFailedError, match=r"doomed ended 4 times, .* status 9(.|\n)*the reason"):
        run_until(supervisor, lambda: False)
    supervisor.stop()


@pytest.mark.parametrize("status", [CONFIG, FENCED])
def test_what_a_restart_cannot_mend_is_not_restarted(here: Path, status: int) -> None:
    supervisor = Supervisor(rule=QUICK)
    supervisor.start(role(here, "wrong", f"import sys; print('mend this'); sys.exit({status})"))
    with pytest.raises(RoleFailedError, match=r"(.|\n)*mend this"):
        run_until(supervisor, lambda: False)
    assert supervisor.roles[0].restarts.total == 0


def test_a_role_that_may_finish_is_left_finished(here: Path) -> None:
    supervisor = Supervisor(rule=QUICK)
    supervisor.start(role(here, "trainer", "pass", finishes=True))
    run_until(supervisor, lambda: supervisor.finished("trainer"))
    supervisor.stop()
    assert supervisor.roles[0].state is RoleState.FINISHED


def test_a_role_that_must_not_finish_is_restarted_after_status_0(here: Path) -> None:
    supervisor = Supervisor(rule=QUICK)
    supervisor.start(role(here, "engine", "pass"))
    run_until(supervisor, lambda: supervisor.roles[0].restarts.total >= 1)
    supervisor.stop()


def test_restarts_in_a_row_back_off_and_end_however_far_apart_they_are() -> None:
    state = RestartState(RestartRule(limit=3, first_delay_s=1, max_delay_s=3, lasting_s=60))
    assert [state.delay_after(1, now=t, lived_s=50) for t in (0, 59, 118)] == [1, 2, 3]
    assert state.delay_after(1, now=177, lived_s=50) is None
    assert state.total == 3


def test_a_process_that_lived_long_starts_a_new_row() -> None:
    state = RestartState(RestartRule(limit=2, first_delay_s=1, lasting_s=60))
    assert [state.delay_after(1, now=t, lived_s=1) for t in (0, 2)] == [1, 2]
    assert state.delay_after(1, now=70, lived_s=60) == 1
    assert state.total == 3


def test_long_lives_are_not_restarted_for_ever() -> None:
    state = RestartState(RestartRule(window_limit=2, window_s=1000))
    assert [state.delay_after(1, now=t, lived_s=90) for t in (0, 100)] == [0.5, 0.5]
    assert state.delay_after(1, now=200, lived_s=90) is None
    assert state.delay_after(1, now=1001, lived_s=90) == 0.5


def test_a_watchdog_exit_is_restarted_at_once_and_counted() -> None:
    state = RestartState(RestartRule(limit=2))
    assert [state.delay_after(WATCHDOG, now=t, lived_s=20) for t in (0, 20)] == [0.0, 0.0]
    assert state.delay_after(WATCHDOG, now=40, lived_s=20) is None
    assert state.total == 2


def test_a_restart_is_announced_with_the_last_line_of_the_log(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = Supervisor(rule=QUICK)
    supervisor.start(role(here, "doomed", "import sys; print('first'); print('the reason\\n'); sys.exit(9)"))
    run_until(supervisor, lambda: supervisor.roles[0].restarts.total >= 1)
    supervisor.stop()
    assert "its last line: the reason" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_kill_9_of_the_supervisor_leaves_nothing_running(here: Path) -> None:
    code = f"""
    import time
    from pathlib import Path
    from headrace.deploy.supervisor import RoleSpec, Supervisor
    import sys
    supervisor = Supervisor()
    for name in ("a", "b"):
        supervisor.start(RoleSpec(name=name, argv=[sys.executable, "-c", {SLEEPER!r}, name], log=Path(name)))
    Path("pids").write_text(" ".join(str(r.process.pid) for r in supervisor.roles))
    while True: time.sleep(60)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    wait_for(lambda: (here / "a.up").exists() and (here / "b.up").exists() and (here / "pids").exists())
    pids = [int(p) for p in (here / "pids").read_text().split()]
    assert all(alive(p) for p in pids)
    owner.kill()
    owner.wait()
    wait_for(lambda: not any(alive(p) for p in pids))


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_interrupts_are_raised_once_and_then_hurry(here: Path, signals: list[signal.Signals]) -> None:
    code = """
    import sys, time
    from pathlib import Path
    from headrace.deploy.interrupts import Interrupted, Interrupts
    with Interrupts() as interrupts:
        try:
            Path("up").touch()
            while True: time.sleep(0.01)
        except Interrupted as e:
            Path("closing").touch()
            while sys.argv[1] == "2" and not interrupts.hurry(): time.sleep(0.01)
            sys.exit(e.exit_status)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(len(signals))])
    for number, path in zip(signals, ("up", "closing"), strict=False):
        wait_for((here / path).exists)
        process.send_signal(number)
    assert process.wait(20) == 128 + signals[0]


def test_what_was_spawned_when_an_interruption_came_is_stopped(here: Path) -> None:
    code = """
    import os, signal, subprocess, sys
    from pathlib import Path
    from headrace.deploy import processes
    from headrace.deploy.interrupts import Interrupted, Interrupts
    class Popen(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            signal.raise_signal(signal.SIGINT)
            Path("pid").write_text(str(self.pid))
    subprocess.Popen = Popen
    try:
        with Interrupts() as interrupts, processes.children_stopped(grace_s=5):
            processes.spawn(["sleep", "60"], log=Path("log"))
            print("not here")
    except Interrupted as e:
        try:
            os.kill(int(Path("pid").read_text()), 0)
        except ProcessLookupError:
            sys.exit(e.exit_status)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, ""), done.stderr


def test_restarts_are_counted_by_cause_and_told_to_the_role_that_is_started_anew(here: Path) -> None:
    told: list[object] = []
    supervisor = Supervisor(rule=QUICK, on_restart=lambda counts: told.append(counts))
    supervisor.start(
        role(
            here,
            "streams-0",
            """
            import os, signal, sys, time
            known = os.environ["HEADRACE_RESTARTS"]
            open("known", "a").write(known + ";")
            if not known: sys.exit(70)
            if known == "stalled=1": os.kill(os.getpid(), signal.SIGKILL)
            if known == "stalled=1,killed=1": sys.exit(1)
            time.sleep(60)
            """,
        )
    )
    known = here / "known"
    wanted = ";stalled=1;stalled=1,killed=1;stalled=1,killed=1,crashed=1;"
    run_until(supervisor, lambda: known.exists() and known.read_text() == wanted)
    supervisor.stop()
    counts = {"streams-0": {"stalled": 1, "killed": 1, "crashed": 1}}
    assert told[-1] == counts
    write_restarts(here, counts)
    assert read_restarts(here) == counts
    assert restarts_text(read_restarts(here)) == ["streams-0: 3 (stalled 1, killed 1, crashed 1)"]


def test_a_role_exports_the_restarts_that_its_supervisor_counted() -> None:
    def value(cause: str) -> float:
        return metrics.role_restarts.labels(cause=cause)._value.get()

    before = {c: value(c) for c in metrics.RESTART_CAUSES}
    metrics.note_restarts("stalled=2,killed=1,nonsense=3")
    assert [value(c) - before[c] for c in ("stalled", "killed", "crashed")] == [2, 1, 0]
    assert set(metrics.RESTART_CAUSES) == {c.value for c in RestartCause}
