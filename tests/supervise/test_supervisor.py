"""The supervisor as a process over fake children: what it prints, its exit code, and that it leaves nothing."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.supervise.life import Life
from headrace.supervise.notify import Notifier
from headrace.supervise.screen import Screen
from headrace.supervise.watch import StopSignals, Watch
from tests.supervise.fakes import fake, healthy

ROOT = Path(__file__).parents[2]
STAY = "ready({who!r}); until_stopped()"


class Service:
    """One supervisor; `pids` are its children's once it is ready."""

    def __init__(self, env: Mapping[str, str] | None = None, **bodies: str) -> None:
        arguments = [text for who, body in bodies.items() for text in (who, body.format(who=who))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.supervise.serve_fakes", *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, psutil.Process]:
        assert self.process.stderr is not None
        pids = json.loads(next(line for line in self.process.stderr if line.startswith("{")))
        return {who: psutil.Process(pid) for who, pid in pids.items()}

    def end(self) -> tuple[int, str, list[str]]:
        """Exit code, standard output, lines of standard error since `ready`."""
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err.splitlines()


Start = Callable[..., Service]


@pytest.fixture
def start() -> Iterator[Start]:
    services: list[Service] = []

    def start(env: Mapping[str, str] | None = None, **bodies: str) -> Service:
        services.append(Service(env, **bodies))
        return services[-1]

    yield start
    for service in services:
        service.process.kill()
        service.process.communicate()


def all_gone(children: dict[str, psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(list(children.values()), timeout=10)
    return all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


def test_ready_is_one_line_of_json_and_a_stop_says_nothing(start: Start) -> None:
    service = start(engine=STAY, http=STAY)
    children = service.ready()
    service.process.send_signal(signal.SIGTERM)
    code, out, err = service.end()
    assert (code, err) == (0, [])
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["ready"]
    assert all_gone(children)


def test_what_the_engine_says_at_its_end_is_shown_after_a_stop_and_not_after_a_failure(start: Start) -> None:
    last_word = "say(type='ended', who='engine', fields=dict(steps=7))"
    body = f"signal.signal(signal.SIGTERM, lambda *_: ({last_word}, os._exit(0))); {STAY}"
    stopped, failed = start(engine=body, http=STAY), start(engine=body, http=STAY)
    stopped.ready()
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.end()[::2] == (0, ['{"steps": 7}'])
    failed.ready()["http"].kill()
    assert failed.end()[::2] == (1, ["headrace serve: http: killed by signal 9 (SIGKILL)"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_stop_cleanly_too(start: Start, number: signal.Signals) -> None:
    service = start(engine=STAY, http=STAY)
    children = service.ready()
    service.process.send_signal(number)
    assert service.end()[0] == 0
    assert all_gone(children)


def test_a_second_signal_kills_what_does_not_end(start: Start) -> None:
    service = start(engine="deaf(); ready({who!r}); until_stopped()", http=STAY)
    children = service.ready()
    service.process.send_signal(signal.SIGINT)
    # Once the polite one has ended, the first signal has been taken in.
    children["http"].wait(60)
    service.process.send_signal(signal.SIGINT)
    assert service.end()[0] == 0
    assert all_gone(children)


def test_a_killed_child_ends_the_service_with_one_line_that_names_it(start: Start) -> None:
    service = start(engine=STAY, http=STAY)
    children = service.ready()
    children["engine"].kill()
    code, _, err = service.end()
    assert (code, err) == (1, ["headrace serve: engine: killed by signal 9 (SIGKILL)"])
    assert all_gone(children)


def test_a_child_that_does_not_end_does_not_hold_up_the_end(start: Start) -> None:
    service = start(engine="deaf(); ready({who!r}); until_stopped()", http=STAY)
    children = service.ready()
    children["http"].kill()
    code, _, err = service.end()
    assert code == 1
    assert err[-1] == "headrace serve: http: killed by signal 9 (SIGKILL)"
    assert all_gone(children)


def test_a_users_error_found_by_a_child_is_exit_2(start: Start) -> None:
    failing = "failed('worker rank 0', 'the checkpoint lacks tensor a', user_error=True); sys.exit(2)"
    service = start(engine=STAY, worker=failing)
    assert service.end() == (2, "", ["headrace serve: the checkpoint lacks tensor a"])


def test_the_cause_is_told_and_not_its_echo(start: Start) -> None:
    service = start(
        engine="failed('engine', 'rank 1 is gone', secondary=True); sys.exit(1)",
        worker="failed('worker rank 1', 'IndexError: 7'); sys.exit(1)",
    )
    assert service.end() == (1, "", ["headrace serve: worker rank 1: IndexError: 7"])


def test_an_exit_nobody_asked_for_is_a_fault_even_a_clean_one(start: Start) -> None:
    service = start(engine=STAY, http="ready('http')")
    code, _, err = service.end()
    assert code == 1
    assert err[-1] == "headrace serve: http: ended without a report (exit code 0)"


def test_children_end_with_a_supervisor_that_is_killed(start: Start) -> None:
    service = start(engine=STAY, http=STAY)
    children = service.ready()
    service.process.kill()
    service.end()
    assert all_gone(children)


def test_many_run_side_by_side_and_each_has_its_own_fate(start: Start) -> None:
    services = [start(engine=STAY, http=STAY) for _ in range(6)]
    children = [service.ready() for service in services]
    children[0]["http"].kill()
    assert services[0].end()[0] == 1
    for service in services[1:]:
        assert service.process.poll() is None
        service.process.terminate()
    assert [service.end()[0] for service in services[1:]] == [0] * 5
    assert all(all_gone(each) for each in children)


def test_progress_is_shown_while_it_loads(start: Start) -> None:
    body = "say(type='progress', who='worker rank 0', text='loading weights', done=5, total=10); until_stopped()"
    service = start(worker=body)
    assert service.process.stderr is not None
    assert service.process.stderr.readline() == "loading weights: 50% (5 bytes of 10 bytes)\n"
    service.process.terminate()
    assert service.end()[0] == 0


def test_the_service_manager_hears_a_life_and_its_watchdog_is_not_fed_for_a_stopped_process(
    start: Start, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)

        def heard_until(text: str) -> list[str]:
            heard: list[str] = []
            while not heard or text not in heard[-1]:
                heard.append(manager.recv(4096).decode())
            return heard

        load = "[say(type='progress', who='w', text='loading', done=done, total=2) for done in (0, 1, 2)]; " + STAY
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        service = start(env, engine=load, http=STAY)
        children = service.ready()
        first = heard_until("READY=1")
        assert first[0] == "STATUS=loading: 0% (0 bytes of 2 bytes)"
        assert "STATUS=warming up\nEXTEND_TIMEOUT_USEC=300000000" in first
        heard_until("WATCHDOG=1")
        children["engine"].suspend()
        heard_until("STATUS=no sign of life from engine")
        children["engine"].resume()
        assert heard_until("STATUS=ready")[0] == "WATCHDOG=1"
        children["http"].kill()
        heard_until("STATUS=failed: http: killed by signal 9 (SIGKILL)")
        assert service.end()[0] == 1


def test_work_that_nobody_gets_on_with_ends_the_service_with_who_holds_it_up(start: Start) -> None:
    beat = "[(say(type='beat', who={who!r}, {fields}), time.sleep(0.05)) for _ in iter(int, 1)]"
    stuck = beat.replace("{fields}", "doing='plan 7', where='layers/decoder.py forward:50'")
    waiting = beat.replace("{fields}", "doing='plan 7', waits=True")
    idle = beat.replace("{fields}", "turns=time.monotonic_ns()")
    service = start(env={"STALL_S": "0.5"}, engine=f"import time; {idle}", second=f"import time; {waiting}",
                    first=f"import time; {stuck}")  # fmt: skip
    code, _, err = service.end()
    assert code == 1
    assert re.fullmatch(r"headrace serve: first: stalled for \d+ s in plan 7, at layers/decoder.py forward:50", err[-1])


def test_a_death_while_requests_drain_is_a_fault() -> None:
    # The http process takes its time to end, as with requests in flight.
    slow = "signal.signal(signal.SIGTERM, lambda *_: ready('drains')); ready('http'); until_stopped()"
    commands = [fake("http", slow), healthy("engine", 1), fake("worker", "ready('worker'); until_stopped()", 2)]
    told: list[str] = []
    screen = Screen(io.StringIO())
    with StopSignals() as signals:

        def on_ready(_engine: Mapping[str, Any], http: Mapping[str, Any], _s: float) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

        watch = Watch(
            commands=commands,
            signals=signals,
            screen=screen,
            life=Life(Notifier()),
            on_ready=on_ready,
            on_end=lambda _: told.append("end"),
            on_failure=lambda evidence, group: told.append(evidence.failure.line),
        )
        kill_when_draining(watch, "worker")
        assert watch.run() == 1
    assert told == ["worker: killed by signal 9 (SIGKILL)", "end"]


def kill_when_draining(watch: Watch, who: str) -> None:
    """Have a process killed as soon as the state is entered."""

    class Draining(Life):
        def draining(self) -> None:
            super().draining()
            assert watch.signals.group is not None
            watch.signals.group.signal(signal.SIGKILL, who)

    watch.life = Draining(Notifier())


def test_a_log_on_a_full_disk_stops_nothing() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    said = "print('x' * 1000, flush=True); " + STAY
    arguments = [text for who in ("engine", "http") for text in (who, said.format(who=who))]
    with full.open("w") as log:
        program = [sys.executable, "-m", "tests.supervise.serve_fakes", "--quiet", *arguments]
        process = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "ready"
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()
