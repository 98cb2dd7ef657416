"""Waiting with a clock of the test's: the loop that this command grew from, and what it has learnt since."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.doctor.causes import diagnose, load_causes
from headrace.wait.report import Heartbeat, error_lines, outcome_text
from headrace.wait.watch import Outcome, Sight, watch
from tests.wait.clock import FakeClock

JOURNAL = [
    "INFO loading weights",
    "  File triton_backend.py, line 120, in __init__",
    "    self.v_head_dim = model_runner.token_to_kv_pool.get_value_buffer(0).shape[-1]",
    "IndexError: list index out of range",
    "INFO killing the other ranks",
]


@dataclass
class Scripted:
    """A side that shows what the last second of its script has."""

    clock: FakeClock
    script: dict[float, Sight]
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.clock.now()

    def look(self) -> Sight:
        now = self.clock.now() - self.start
        return self.script[max(second for second in self.script if second <= now)]

    def last_lines(self) -> list[str]:
        return self.log


def run(
    clock: FakeClock, sides: Sequence[Scripted], every_s: float = 15, timeout_s: float = 1350
) -> tuple[Outcome, str]:
    """How it ended, and everything that was printed."""
    stream = io.StringIO()
    outcome = watch(sides, clock, every_s=every_s, timeout_s=timeout_s, say=Heartbeat(stream).say)
    findings = diagnose(outcome.log, load_causes())
    return outcome, stream.getvalue() + "\n".join(outcome_text(outcome, findings)) + "\n"


def unit(clock: FakeClock, **later: Sight) -> Scripted:
    first = {0.0: Sight("unit model active (running)", ready=True)}
    return Scripted(clock, first | {float(second[1:]): sight for second, sight in later.items()}, JOURNAL)


def http(clock: FakeClock, ready_s: float) -> Scripted:
    return Scripted(clock, {0.0: Sight("HTTP: no connection"), ready_s: Sight("HTTP: model m answers", ready=True)})


def test_a_model_that_fails_at_75_seconds_is_told_then_with_its_error_and_the_known_cause() -> None:
    clock = FakeClock()
    failed = unit(clock, s70=Sight("unit model has failed: exit-code, exit code 1", failed=True))
    outcome, printed = run(clock, [failed, http(clock, 9999)])
    assert (outcome.verdict, outcome.elapsed_s) == ("failed", 75)
    assert printed.splitlines() == [
        "[0s] unit model active (running); HTTP: no connection",
        "[30s] unit model active (running); HTTP: no connection",
        "[60s] unit model active (running); HTTP: no connection",
        "[75s] failed: unit model has failed: exit-code, exit code 1",
        "  IndexError: list index out of range",
        "known cause: an attention backend takes its shapes from layer 0, which only the first pipeline stage has: "
        + next(cause.advice for cause in load_causes() if cause.name == "backend-asks-for-layer-0"),
    ]


def test_a_model_that_is_ready_at_120_seconds_is_told_then() -> None:
    clock = FakeClock()
    outcome, printed = run(clock, [unit(clock), http(clock, 110)])
    assert (outcome.verdict, outcome.elapsed_s) == ("ready", 120)
    assert printed.splitlines()[-1] == "[120s] ready: unit model active (running); HTTP: model m answers"


def test_an_answer_counts_only_while_the_unit_lives() -> None:
    clock = FakeClock()
    starting = Scripted(clock, {0.0: Sight("unit activating"), 40.0: Sight("unit active", ready=True)})
    outcome, _ = run(clock, [starting, http(clock, 0)], every_s=10)
    assert (outcome.verdict, outcome.elapsed_s) == ("ready", 40)


def test_one_that_never_comes_is_given_up_in_time_with_the_end_of_its_log() -> None:
    clock = FakeClock()
    outcome, printed = run(clock, [unit(clock), http(clock, 9999)], timeout_s=100)
    assert (outcome.verdict, outcome.elapsed_s) == ("timed out", 100)
    assert printed.splitlines()[-2:] == [
        "[100s] timed out: unit model active (running); HTTP: no connection",
        "  IndexError: list index out of range",
    ]


def test_the_log_is_that_of_the_side_that_has_one() -> None:
    clock = FakeClock()
    gone = Scripted(clock, {0.0: Sight("HTTP: gone", failed=True)})
    outcome, _ = run(clock, [unit(clock), gone])
    assert outcome.log == JOURNAL


@given(st.floats(2, 60), st.floats(0.1, 600), st.lists(st.floats(0, 70), max_size=5))
def test_looks_keep_in_step_and_end_at_the_timeout(every_s: float, timeout_s: float, takes: list[float]) -> None:
    clock, times = FakeClock(), list[float]()

    class Slow(Scripted):
        def look(self) -> Sight:
            times.append(clock.now() - self.start)
            if len(times) <= len(takes) and takes[len(times) - 1]:
                clock.sleep(takes[len(times) - 1])
            return Sight("nothing")

    outcome = watch([Slow(clock, {})], clock, every_s=every_s, timeout_s=timeout_s, say=lambda _e, _t: None)
    assert outcome.verdict == "timed out"
    assert timeout_s <= outcome.elapsed_s + 1e-6
    assert outcome.elapsed_s <= timeout_s + 70 + 1e-6
    for time in times[:-1]:
        assert abs(time - every_s * round(time / every_s)) < 1e-5


def test_on_a_terminal_one_line_is_written_over() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    heartbeat = Heartbeat(stream)
    heartbeat.say(0, "a")
    heartbeat.say(5, "a")
    heartbeat.clear()
    assert stream.getvalue() == "\r\x1b[K[0s] a\r\x1b[K[5s] a\r\x1b[K"


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ([], []),
        (["loading", "", "still loading"], ["loading", "still loading"]),
        ([f"line {i}" for i in range(20)], [f"line {i}" for i in range(12, 20)]),
        (
            ["\x1b[31mValueError: no\x1b[0m", "INFO up", "headrace serve: http: killed by signal 9 (SIGKILL)", "bye"],
            ["ValueError: no", "headrace serve: http: killed by signal 9 (SIGKILL)"],
        ),
        (["(Core pid=1) ERROR 10-25 [core.py:1] ValueError: No memory", "done"], None),
    ],
)
def test_the_lines_that_are_shown_of_a_log(log: list[str], shown: list[str] | None) -> None:
    assert error_lines(log) == (log[:1] if shown is None else shown)
