"""The child's side: reports, failures, the lifeline, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from headrace.errors import CheckpointError, Fault, PeerLost
from headrace.step import Failed
from headrace.supervise.child import (
    MAX_MESSAGE,
    Beat,
    Ended,
    Progress,
    Ready,
    Report,
    Reporter,
    decode_report,
    failure_of,
)


def read_lines(fd: int) -> list[bytes]:
    return os.read(fd, 1 << 16).splitlines()


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


@pytest.mark.parametrize(
    "event",
    [
        Progress(who="worker rank 1 (stage 1)", text="loading weights", done=1, total=1),
        Ready(who="engine", fields={"kv_tokens": 4096, "stages": [{"stage": 0}]}),
        Ended(who="engine", fields={"stages": [{"stage": 0, "busy_s": 0.5}]}),
        Failed(who="engine", message="no\u00a0more", secondary=True),
    ],
)
def test_a_report_crosses_the_pipe(pipe: tuple[int, int], event: Progress | Ready | Failed) -> None:
    Reporter(pipe[1]).report(event)
    (line,) = read_lines(pipe[0])
    assert decode_report(line) == event


def test_progress_is_thinned_but_its_end_always_arrives(pipe: tuple[int, int]) -> None:
    now = 0.0
    reporter = Reporter(pipe[1], clock=lambda: now)
    for done in range(101):
        now += 0.01
        reporter.report(Progress(who="w", text="loading", done=done, total=100))
    dones = [event.done for line in read_lines(pipe[0]) if isinstance(event := decode_report(line), Progress)]
    assert dones[0] == 0
    assert dones[-1] == 100
    assert 9 <= len(dones) <= 13


def test_a_parent_that_is_gone_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    reporter = Reporter(pipe[1])
    reporter.report(Ready(who="w"))
    reporter.report(Ready(who="w"))
    assert not reporter.attached


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CheckpointError("lacks\n  a.weight"), Failed(who="w", message="lacks a.weight", user_error=True)),
        (PeerLost("rank 1 is gone"), Failed(who="w", message="rank 1 is gone", secondary=True)),
        (Fault("disk full"), Failed(who="w", message="disk full")),
        (ZeroDivisionError("division by zero"), Failed(who="w", message="ZeroDivisionError: division by zero")),
    ],
)
def test_what_is_reported_of_an_exception(error: Exception, expected: Failed) -> None:
    assert failure_of("w", error) == expected


def test_a_long_message_is_cut() -> None:
    assert len(failure_of("w", RuntimeError("x" * 10_000)).message) == MAX_MESSAGE


CHILD = """
import signal, sys
from headrace.errors import Fault, UserError
from headrace.supervise.child import Ready, attach, run_child
def stop():
    reporter.report(Ready(who="stopping"))
    raise SystemExit(0)
reporter = attach(int(sys.argv[1]), stop)
def main():
    reporter.report(Ready(who="child"))
    {body}
run_child("child", main, reporter)
"""


class Child:
    """A process that uses `attach` and `run_child` for real."""

    def __init__(self, body: str, program: str = CHILD) -> None:
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program.replace("{body}", body), str(write)],
            stdin=subprocess.PIPE,
            pass_fds=(write,),
        )
        os.close(write)
        self.reports = os.fdopen(read, "rb")

    def next(self) -> Report:
        return decode_report(self.reports.readline())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.reports.close()


@pytest.mark.parametrize(
    ("body", "code", "failed"),
    [
        ("raise UserError('--pp 9: too many')", 2, Failed(who="child", message="--pp 9: too many", user_error=True)),
        ("raise Fault('lost')", 1, Failed(who="child", message="lost")),
        ("{}['x']", 1, Failed(who="child", message="KeyError: 'x'")),
        ("pass", 0, None),
    ],
)
def test_a_child_ends_with_a_report_and_a_code(body: str, code: int, failed: Failed | None) -> None:
    with Child(body) as child:
        assert child.next() == Ready(who="child")
        before, rest = time.monotonic(), child.reports.read()
        said = decode_report(rest) if rest else None
        if isinstance(said, Failed):
            assert before - 60 < said.at_s <= time.monotonic()
            said = msgspec.structs.replace(said, at_s=0.0)
        assert said == failed
        assert child.process.wait(60) == code


def test_a_failed_child_ends_though_its_threads_run_on() -> None:
    with Child("import threading; threading.Thread(target=signal.pause).start(); raise Fault('lost')") as child:
        assert child.process.wait(60) == 1


def test_a_child_ends_with_its_parent_and_not_with_ctrl_c() -> None:
    with Child("[signal.pause() for _ in iter(int, 1)]") as child:
        child.next()
        child.process.send_signal(signal.SIGINT)
        assert child.process.poll() is None
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(60) == 1


def test_a_supervisor_that_does_not_read_holds_up_no_beat(pipe: tuple[int, int]) -> None:
    reporter = Reporter(pipe[1])
    for _ in range(5000):
        reporter.report(Beat("w", "plan 7"))
    lines = read_lines(pipe[0])
    assert 0 < len(lines) < 5000
    assert {decode_report(line) for line in lines} == {Beat("w", "plan 7")}
    reporter.report(Ready(who="w"))
    assert decode_report(read_lines(pipe[0])[0]) == Ready(who="w")


HEARING = """
import faulthandler, sys, threading
from pathlib import Path
from headrace.supervise.child import Ready, attach
reporter = attach(int(sys.argv[1]), on_failure=lambda why: reporter.report(Ready(who=why)), stacks=Path({stacks!r}))
def busy_in_c():
    reporter.report(Ready(who="child"))
    threading.Event().wait()
busy_in_c()
"""


def test_a_child_hears_why_the_service_fails_and_writes_its_stacks(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks" / "w.txt"
    with Child("", HEARING.format(stacks=str(stacks))) as child:
        assert child.next() == Ready(who="child")
        assert child.process.stdin is not None
        child.process.stdin.write(b"rank 1: lost\nrank 2")
        child.process.stdin.flush()
        assert child.next() == Ready(who="rank 1: lost")
        child.process.send_signal(signal.SIGUSR1)
        child.process.stdin.write(b": lost\n")
        child.process.stdin.flush()
        assert child.next() == Ready(who="rank 2: lost")
        # The signal is for the main thread, which may be slower to wake than the one that hears.
        for _ in range(10_000):
            if "in busy_in_c" in stacks.read_text():
                break
            child.process.stdin.write(b"more\n")
            child.process.stdin.flush()
            assert child.next() == Ready(who="more")
        else:
            pytest.fail("no stacks")
        assert child.process.poll() is None


def test_sigterm_calls_back() -> None:
    # As every child's loop: it never waits without a deadline, since a handler may run just before the wait.
    with Child("import select; [select.select([], [], [], 0.05) for _ in iter(int, 1)]") as child:
        child.next()
        child.process.send_signal(signal.SIGTERM)
        assert child.next() == Ready(who="stopping")
        assert child.process.wait(60) == 0


def test_without_a_supervisor_the_failure_goes_to_standard_error() -> None:
    code = CHILD.replace("int(sys.argv[1])", "None").format(body="raise UserError('--rank 7: no such rank')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "child: --rank 7: no such rank\n")
