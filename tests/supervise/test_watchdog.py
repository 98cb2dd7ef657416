"""What the service manager's watchdog is fed for: beats that are heard, and an engine that is idle or gets on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.step import Failed
from headrace.supervise.life import FAULT_S, Life, watchdog_s
from headrace.supervise.vitals import Limits, Sign
from tests.supervise.test_life import Heard
from tests.supervise.test_vitals import FIRST, SECOND, Room


class Watched(Room):
    """A ready service whose life is told, second by second."""

    def __init__(self, stall_s: float = 60.0) -> None:
        limits = Limits(stall_s=stall_s)
        super().__init__(limits)
        self.heard = Heard(watchdog_s=watchdog_s(limits))
        self.life = Life(self.heard, lambda: self.now)
        self.fed_s, self.num_heard = 0.0, 0
        # All have beaten by then.
        self.second()
        self.life.ready("ready at http://x")
        self.second()

    def second(self) -> Failed | None:
        failed = super().second()
        if failed is None:
            self.life.tick(self.vitals.silent)
            if any("WATCHDOG" in sent for sent in self.heard.sent[self.num_heard :]):
                self.fed_s = self.now
            self.num_heard = len(self.heard.sent)
        return failed

    def is_fed(self) -> bool:
        """Whether it is fed within the third of its time that comes now."""
        before = self.fed_s
        assert self.heard.watchdog_s is not None
        self.seconds(int(self.heard.watchdog_s) // 3 + 1)
        return self.fed_s > before


def test_it_is_fed_while_all_beat_and_nothing_is_to_be_done() -> None:
    room = Watched()
    assert all(room.is_fed() for _ in range(20))


def test_it_is_fed_while_work_gets_on_or_a_long_step_computes() -> None:
    room = Watched()
    room.say("engine", doing="work for 2 plans in flight")
    room.say(FIRST, doing="plan 7", at_work=True)
    room.say(SECOND, doing="plan 7", waits=True)
    assert all(room.is_fed() for _ in range(5))
    for done in range(1, 20):
        room.say(FIRST, doing=f"plan {done}", done=done)
        room.seconds(20)
        assert room.now - room.fed_s <= 45


@pytest.mark.parametrize("stall_s", [60.0, 600.0])
def test_a_stale_beat_stops_the_feeding_and_a_fresh_one_brings_it_back(stall_s: float) -> None:
    room = Watched(stall_s)
    beat, room.beats[SECOND] = room.beats[SECOND], None
    for second in range(int(stall_s) - 1):
        # At work, so that it is not given up yet.
        room.signs[SECOND] = Sign(cpu_s=float(second))
        assert room.second() is None
    assert room.fed_s == room.now - (stall_s - 1)
    assert room.heard.sent[-1] == {"STATUS": f"no sign of life from {SECOND}"}
    room.beats[SECOND] = beat
    room.second()
    assert room.fed_s == room.now


def stalls(room: Watched) -> None:
    room.say("engine", doing="work for 2 plans in flight")
    room.say(FIRST, doing="plan 7")


def loops_no_more(room: Watched) -> None:
    room.turning.clear()


def falls_silent(room: Watched) -> None:
    room.beats[SECOND] = None


def is_stopped(room: Watched) -> None:
    room.beats[FIRST], room.signs[FIRST] = None, Sign(stopped=True)


@pytest.mark.parametrize("stall_s", [1.0, 30.0, 60.0, 600.0])
@pytest.mark.parametrize("trouble", [stalls, loops_no_more, falls_silent, is_stopped])
def test_who_is_at_fault_is_known_before_it_starves(trouble: Callable[[Watched], None], stall_s: float) -> None:
    for well in range(30):
        room = Watched(stall_s)
        room.seconds(100 + well)
        trouble(room)
        failed, _ = room.seconds(2000)
        assert failed is not None
        starves_s = room.fed_s + watchdog_s(Limits(stall_s=stall_s))
        assert room.now + FAULT_S - 1 <= starves_s
