"""What the service manager hears of a life, with a clock of the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.supervise.child import Progress
from headrace.supervise.life import START_TIMEOUT_S, Life
from headrace.supervise.notify import Notifier

MORE_TIME = START_TIMEOUT_S * 1_000_000


@dataclass(frozen=True)
class Heard(Notifier):
    """A manager that keeps what it hears."""

    sent: list[dict[str, str | int]] = field(default_factory=list)

    def send(self, **assignments: str | int) -> None:
        self.sent.append(assignments)


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def loading(done: int, who: str = "rank 0") -> Progress:
    return Progress(who=who, text="loading weights", done=done, total=10)


def test_a_start_gets_more_time_only_while_bytes_advance(clock: Clock) -> None:
    heard = Heard()
    life = Life(heard, clock)
    for done in (0, 4, 4, 4, 6):
        life.progress(loading(done))
        clock.now += 2
    assert [sent.get("EXTEND_TIMEOUT_USEC") for sent in heard.sent] == [None, MORE_TIME, None, None, MORE_TIME]
    assert heard.sent[1]["STATUS"] == "loading weights: 40% (4 bytes of 10 bytes)"
    assert life.state == "loading"


def test_progress_is_told_once_a_second_and_its_end_at_once(clock: Clock) -> None:
    heard = Heard()
    life = Life(heard, clock)
    for tenths in range(31):
        clock.now = tenths / 10
        life.progress(loading(tenths // 10))
    life.progress(loading(10))
    assert [sent["STATUS"] for sent in heard.sent[:-1]] == [
        f"loading weights: {10 * done}% ({done} bytes of 10 bytes)" for done in range(4)
    ]
    assert heard.sent[-1] == {"STATUS": "warming up", "EXTEND_TIMEOUT_USEC": MORE_TIME}
    assert life.state == "warming"


def test_ranks_are_summed(clock: Clock) -> None:
    heard = Heard()
    life = Life(heard, clock)
    life.progress(loading(10, "rank 0"))
    life.progress(loading(5, "rank 1"))
    assert life.state == "loading"
    assert heard.sent[-1]["STATUS"] == "loading weights: 75% (15 bytes of 20 bytes)"


@given(st.lists(st.integers(0, 10), max_size=20))
def test_extensions_are_as_many_as_times_at_which_more_was_done_than_ever(steps: list[int]) -> None:
    clock, heard = Clock(), Heard()
    life = Life(heard, clock)
    records = most = 0
    for done in steps:
        clock.now += 1
        life.progress(loading(done))
        records, most = records + (done > most), max(most, done)
    assert sum("EXTEND_TIMEOUT_USEC" in sent for sent in heard.sent) == records


def test_the_watchdog_is_fed_when_ready_and_well(clock: Clock) -> None:
    heard = Heard(watchdog_s=30.0)
    life = Life(heard, clock)
    life.tick(list)
    assert heard.sent == []
    life.ready("ready at http://x")
    assert heard.sent == [{"READY": 1, "STATUS": "ready at http://x", "WATCHDOG": 1}]
    for _ in range(60):
        clock.now += 1
        life.tick(list)
    assert heard.sent[1:] == [{"WATCHDOG": 1}] * 6


def test_silence_starves_the_watchdog_and_is_told_once(clock: Clock) -> None:
    heard, silent = Heard(watchdog_s=30.0), ["rank 1"]
    life = Life(heard, clock)
    life.ready("ready at http://x")
    for _ in range(40):
        clock.now += 1
        life.tick(lambda: silent)
    assert heard.sent[1:] == [{"STATUS": "no sign of life from rank 1"}]
    silent.clear()
    life.tick(lambda: silent)
    assert heard.sent[2:] == [{"WATCHDOG": 1}, {"STATUS": "ready at http://x"}]


def test_a_manager_that_does_not_watch_is_not_fed(clock: Clock) -> None:
    heard = Heard()
    life = Life(heard, clock)
    life.ready("ready")
    clock.now = 1000
    life.tick(lambda: pytest.fail("nobody asked"))
    assert len(heard.sent) == 1


def test_the_end_is_told_and_nothing_behind_it(clock: Clock) -> None:
    heard = Heard(watchdog_s=3.0)
    life = Life(heard, clock)
    life.starting("looking for org/model on the hub")
    life.draining()
    life.progress(loading(5))
    clock.now = 100
    life.tick(list)
    assert heard.sent == [
        {"STATUS": "looking for org/model on the hub"}, {"STOPPING": 1, "STATUS": "draining"},
    ]  # fmt: skip
    life.failed("rank 1: lost")
    assert heard.sent[-1] == {"STATUS": "failed: rank 1: lost"}
