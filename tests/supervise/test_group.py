"""Groups of real, tiny processes: started, heard, stopped, none left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from headrace.errors import Fault
from headrace.step import Failed
from headrace.supervise.child import Ended, Ready
from headrace.supervise.group import Event, Exited, ProcessGroup
from headrace.supervise.launch import Command
from tests.supervise.fakes import fake, healthy

Found = TypeVar("Found", bound=Event)


def hear(group: ProcessGroup, wanted: Callable[[list[Event]], bool]) -> list[Event]:
    """Everything up to the moment at which `wanted` holds."""
    events: list[Event] = []
    while not wanted(events):
        more = group.wait(60)
        assert more, f"nothing more came after {events}"
        events += more
    return events


def all_ready(group: ProcessGroup, count: int) -> dict[str, int]:
    """Wait until `count` children are ready; their pids by name."""
    events = hear(group, lambda events: sum(isinstance(e, Ready) for e in events) == count)
    return {event.who: event.fields["pid"] for event in events if isinstance(event, Ready)}


def gone(pid: int) -> bool:
    """Whether a process has ended; its parent may not have looked yet."""
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE or process.wait(10) is None
    except psutil.NoSuchProcess:
        return True


def test_reports_and_exits_arrive_in_order() -> None:
    with ProcessGroup([fake("a", "ready('a'); failed('a', 'disk full'); sys.exit(3)")]) as group:
        group.start()
        events = hear(group, lambda events: any(isinstance(e, Exited) for e in events))
    assert [type(event) for event in events] == [Ready, Failed, Exited]
    assert events[-1] == Exited("a", 3)


def test_everything_a_child_wrote_before_its_end_is_read() -> None:
    body = "[ready('a', text='x' * 1000, n=i) for i in range(500)]"
    with ProcessGroup([fake("a", body)]) as group:
        group.start()
        events = hear(group, lambda events: any(isinstance(e, Exited) for e in events))
    assert [event.fields["n"] for event in events if isinstance(event, Ready)] == list(range(500))


def test_a_death_is_told_once_and_names_the_signal() -> None:
    with ProcessGroup([fake("a", "os.kill(os.getpid(), signal.SIGKILL)"), healthy("b")]) as group:
        group.start()
        events = hear(group, lambda events: len(events) == 2)
        assert Exited("a", -9) in events
        assert group.pids.keys() == {"b"}
        assert group.wait(0) == []


def test_a_death_is_seen_though_a_grandchild_holds_the_pipe() -> None:
    body = "os.set_inheritable(fd, True); pid = os.fork(); os._exit(4) if pid else until_stopped()"
    with ProcessGroup([fake("a", body)]) as group:
        group.start()
        assert hear(group, bool) == [Exited("a", 4)]


def test_a_line_that_is_no_report_is_skipped() -> None:
    with ProcessGroup([fake("a", "os.write(fd, b'noise\\n{}\\n'); ready('a'); until_stopped()")]) as group:
        group.start()
        assert all_ready(group, 1).keys() == {"a"}


def test_standard_output_stays_the_parents_own(capfd: pytest.CaptureFixture[str]) -> None:
    with ProcessGroup([fake("a", "print('from a library')")]) as group:
        group.start()
        hear(group, bool)
    assert capfd.readouterr() == ("", "from a library\n")


def test_stop_asks_and_every_child_ends() -> None:
    with ProcessGroup([healthy("a"), healthy("b")]) as group:
        group.start()
        pids = all_ready(group, 2)
        group.stop(60)
        assert not group.pids
    assert all(gone(pid) for pid in pids.values())


def test_a_clean_stop_keeps_its_order(tmp_path: Path) -> None:
    file = tmp_path / "ends"

    def child(who: str, order: int) -> Command:
        # Blocked and awaited, so that it cannot come between the report and the wait.
        take = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
        end = f"signal.sigwait([signal.SIGTERM]); open({str(file)!r}, 'a').write({who!r})"
        return fake(who, f"{take}; ready({who!r}); {end}", order)

    with ProcessGroup([child("w", 2), child("e", 1), child("h", 0)]) as group:
        group.start()
        all_ready(group, 3)
        group.stop(60)
    assert file.read_text() == "hew"


def test_the_last_word_of_one_that_ended_before_the_stop_is_heard() -> None:
    with ProcessGroup([fake("a", "ready('a'); os.read(0, 1); say(type='ended', who='a')")]) as group:
        group.start()
        pid = all_ready(group, 1)["a"]
        group.tell("go")
        # Dead, and neither reaped nor read yet.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert group.stop(60) == [Ended("a"), Exited("a", 0)]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_child_that_does_not_listen_is_killed(ordered: bool) -> None:
    with ProcessGroup([fake("deaf", "deaf(); ready('deaf'); until_stopped()"), healthy("b", 1)]) as group:
        group.start()
        pids = all_ready(group, 2)
        group.stop(0.05, ordered=ordered)
        assert not group.pids
    assert all(gone(pid) for pid in pids.values())


def test_a_stopped_child_is_killed_too() -> None:
    with ProcessGroup([fake("a", "ready('a'); os.kill(os.getpid(), signal.SIGSTOP)")]) as group:
        group.start()
        pids = all_ready(group, 1)
        group.stop(0.05)
    assert gone(pids["a"])


def test_what_a_child_started_goes_with_it() -> None:
    body = "pid = os.fork(); (ready('a', inner=pid) if pid else None); deaf(); until_stopped()"
    with ProcessGroup([fake("a", body)]) as group:
        group.start()
        (event,) = hear(group, lambda events: len(events) == 1)
        assert isinstance(event, Ready)
    assert gone(event.fields["inner"])


def test_leaving_the_context_on_an_error_leaves_nothing() -> None:
    pids: dict[str, int] = {}

    def broken() -> None:
        with ProcessGroup([healthy("a"), healthy("b")]) as group:
            group.start()
            pids.update(all_ready(group, 2))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert all(gone(pid) for pid in pids.values())


def test_a_program_that_is_not_there_is_a_fault_and_leaves_nothing() -> None:
    group = ProcessGroup([healthy("a"), Command(who="b", argv=("/nowhere/python",))])
    with pytest.raises(Fault, match="^b: cannot be started: .*No such file"):
        group.start()
    assert not group.pids


def test_wake_ends_a_wait() -> None:
    with ProcessGroup([healthy("a")]) as group:
        group.start()
        all_ready(group, 1)
        thread = threading.Thread(target=group.wake)
        thread.start()
        assert group.wait(60) == []
        thread.join()


def test_close_twice_is_once() -> None:
    group = ProcessGroup([healthy("a")])
    group.start()
    group.close()
    group.close()
    group.wake()
    assert not group.pids
