"""The root cause among what processes said and how they died."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Fault, UserError
from headrace.step import Failed
from headrace.supervise.failure import Failure, describe_exit, root_cause, settle
from headrace.supervise.group import Exited, ProcessGroup
from tests.supervise.fakes import fake, healthy

KILLED = Exited("worker rank 1 (stage 1)", -9)
USER = Failed(who="worker rank 0 (stage 0)", message="the checkpoint lacks tensor a", user_error=True)
BROKEN = Failed(who="engine", message="IndexError: list index out of range")
SILENT = Exited("http", 1)
ECHO = Failed(who="worker rank 2 (stage 2)", message="no answer from rank 1", secondary=True)


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        (KILLED, [BROKEN, SILENT, ECHO]),
        (USER, [BROKEN, SILENT, ECHO]),
        (BROKEN, [SILENT, ECHO]),
        (SILENT, [ECHO]),
    ],
)
def test_a_cause_goes_before_its_echoes_in_any_order(cause: Failed | Exited, others: list[Failed | Exited]) -> None:
    for order in permutations([cause, *others]):
        assert root_cause(order).who == cause.who


@given(st.permutations([Failed(who=name, message=name) for name in "abc"]))
def test_the_first_of_a_kind_wins(order: list[Failed]) -> None:
    assert root_cause(order).who == order[0].who


def test_the_exit_after_a_report_adds_nothing() -> None:
    failure = root_cause([ECHO, Exited(ECHO.who, 1), BROKEN, Exited(BROKEN.who, 1)])
    assert (failure.line, failure.exit_code) == (f"engine: {BROKEN.message}", 1)


def test_a_users_error_is_said_without_the_process_that_found_it() -> None:
    failure = root_cause([USER])
    assert (failure.line, failure.exit_code) == (USER.message, 2)
    assert isinstance(failure.error(), UserError)
    assert isinstance(root_cause([BROKEN]).error(), Fault)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by signal 9 (SIGKILL)"),
        (-11, "killed by signal 11 (SIGSEGV)"),
        (-40, "killed by signal 40"),
        (0, "ended without a report (exit code 0)"),
        (3, "ended without a report (exit code 3)"),
    ],
)
def test_exits_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_a_cause_that_is_seen_later_than_its_echo_is_found() -> None:
    echo = fake("b", "failed('b', 'no answer from a', secondary=True); sys.exit(1)")
    # The cause dies only once the echo is out: it sees its lifeline's byte, which the test writes.
    cause = fake("a", "ready('a'); until_stopped() if not os.read(0, 1) else os.kill(os.getpid(), signal.SIGSEGV)")
    with ProcessGroup([echo, cause]) as group:
        group.start()
        seen: list[object] = []
        while len(seen) < 3:  # ready, failed, exited
            seen += group.wait(60)
        child = group._children[1].process
        assert child.stdin is not None
        child.stdin.write(b"x")
        child.stdin.flush()
        failure = settle(group, [event for event in seen if isinstance(event, Failed | Exited)])
    assert failure == Failure("a", "killed by signal 11 (SIGSEGV)", False)


def test_settling_takes_what_is_there_when_the_others_stay_well() -> None:
    with ProcessGroup([fake("a", "failed('a', 'disk full'); sys.exit(1)"), healthy("b")]) as group:
        group.start()
        events = group.wait(60)
        while not any(isinstance(event, Failed) for event in events):
            events = group.wait(60)
        assert settle(group, events).line == "a: disk full"
        assert group.pids.keys() == {"b"}
