"""The root cause among what processes said and how they died."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import Fault, UserError
from headrace.step import Failed
from headrace.supervise.failure import Failure, describe_exit, failures_in, has_cause, root_cause, settle
from headrace.supervise.group import Exited, ProcessGroup
from tests.supervise.fakes import fake, healthy

KILLED = Exited("worker rank 1 (stage 1)", -9, at_s=3.0)
USER = Failed(who="worker rank 0 (stage 0)", message="the checkpoint lacks tensor a", user_error=True, at_s=4.0)
BROKEN = Failed(who="engine", message="IndexError: list index out of range", at_s=5.0)
SILENT = Exited("http", 1, at_s=1.0)
ECHO = Failed(who="worker rank 2 (stage 2)", message="no answer from rank 1", secondary=True, at_s=2.0)


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        (KILLED, [USER, BROKEN, SILENT, ECHO]),
        (USER, [BROKEN, SILENT, ECHO]),
        (BROKEN, [SILENT, ECHO]),
        (SILENT, [ECHO]),
    ],
)
def test_a_cause_goes_before_its_echoes_in_any_order(cause: Failed | Exited, others: list[Failed | Exited]) -> None:
    for order in permutations([cause, *others]):
        assert root_cause(order).who == cause.who


@given(st.permutations([Failed(who=name, message=name, at_s=at) for at, name in enumerate("abc")]))
def test_the_first_in_time_wins_not_the_first_heard(order: list[Failed]) -> None:
    assert root_cause(order).who == "a"


@given(
    st.lists(
        st.one_of(
            st.builds(
                Failed, who=st.sampled_from("ab"), message=st.just("m"), secondary=st.booleans(), at_s=st.floats(0, 9)
            ),
            st.builds(
                Exited, who=st.sampled_from("cd"), returncode=st.sampled_from([-9, -6, 0, 1]), at_s=st.floats(0, 9)
            ),
        ),
        min_size=1,
    )
)
def test_what_is_named_is_no_echo_where_there_is_a_cause_and_order_of_arrival_never_matters(
    seen: list[Failed | Exited],
) -> None:
    cause = root_cause(seen)
    assert cause.who == root_cause(sorted(seen, key=lambda each: each.at_s, reverse=True)).who
    if has_cause(seen):
        assert any(e.who == cause.who and not (isinstance(e, Failed) and e.secondary) for e in seen)


def test_the_loudest_is_not_the_cause() -> None:
    memory = Failed(who="worker rank 0 (stage 0)", message="out of memory on the GPU", at_s=10.0)
    abort = Exited("worker rank 1 (stage 1)", -6, at_s=10.3)
    assert root_cause([abort, memory]).who == memory.who
    # Who was killed before is seen a little after those whom it tore down.
    crash = Exited("worker rank 1 (stage 1)", -11, at_s=10.3)
    assert root_cause([crash, memory]).who == crash.who


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


def test_a_kill_while_memory_was_short_says_so() -> None:
    line = root_cause([Exited("w", -9, for_memory=True)]).line
    assert line == "w: killed by signal 9 (SIGKILL); the system ran out of memory and killed processes meanwhile"


def test_the_device_is_named_where_there_is_one() -> None:
    assert Failure("worker rank 1 (stage 1)", "lost", False, "cuda:3").line == "worker rank 1 (stage 1), cuda:3: lost"


def test_where_all_complain_of_others_the_suspect_is_named() -> None:
    complaint = fake("b", "failed('b', 'nothing from a', secondary=True); sys.exit(1)")
    with ProcessGroup([complaint]) as group:
        group.start()
        events = group.wait(60)
        while len(failures_in(events)) < 2:
            events += group.wait(60)
        failure, seen = settle(group, events, lambda: Failed("a", "no sign of life for 4 s"))
    assert (failure.who, len(seen)) == ("a", 3)


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
        failure, _ = settle(group, [event for event in seen if isinstance(event, Failed | Exited)])
    assert failure == Failure("a", "killed by signal 11 (SIGSEGV)", False)


def test_settling_takes_what_is_there_when_the_others_stay_well() -> None:
    with ProcessGroup([fake("a", "failed('a', 'disk full'); sys.exit(1)"), healthy("b")]) as group:
        group.start()
        events = group.wait(60)
        while not any(isinstance(event, Failed) for event in events):
            events = group.wait(60)
        assert settle(group, events)[0].line == "a: disk full"
        assert group.pids.keys() == {"b"}
