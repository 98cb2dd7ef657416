"""Stopped, silent, stalled or merely slow: told apart with a clock of the test's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.step import Failed
from headrace.supervise.child import Beat
from headrace.supervise.vitals import Limits, Sign, Vitals

LIMITS = Limits(stall_s=60.0, step_s=600.0, silent_s=10.0, stopped_s=5.0)
FIRST, SECOND = "worker rank 0 (stage 0)", "worker rank 1 (stage 1)"


class Room:
    """A watch over an engine and two stages, second by second; tests change what the processes say."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 100.0
        self.beats: dict[str, Beat | None] = {
            "engine": Beat("engine", turns=0),
            FIRST: Beat(FIRST),
            SECOND: Beat(SECOND),
        }
        self.signs = dict.fromkeys(self.beats, Sign())
        self.vitals = Vitals(self.beats, limits, lambda: self.now)
        self.turning = {"engine"}

    def say(self, who: str, **fields: object) -> None:
        self.beats[who] = Beat(who, **fields)  # type: ignore[arg-type]  # the struct's own fields

    def second(self) -> Failed | None:
        self.now += 1
        for who, beat in self.beats.items():
            if beat is not None:
                turns = int(self.now) if who in self.turning else beat.turns
                self.vitals.hear([Beat(who, beat.doing, beat.done, turns, beat.waits, beat.at_work, beat.where)])
        return self.vitals.check(self.signs)

    def seconds(self, count: int) -> tuple[Failed | None, int]:
        """The first trouble within so many seconds, and how many passed."""
        for passed in range(1, count + 1):
            failed = self.second()
            if failed is not None:
                return failed, passed
        return None, count


def test_idle_processes_that_beat_are_well_for_ever() -> None:
    assert Room().seconds(5000) == (None, 5000)


def test_an_idle_process_that_falls_silent_is_lost_after_ten_seconds() -> None:
    room = Room()
    room.seconds(5)
    room.beats[SECOND] = None
    failed, passed = room.seconds(60)
    assert failed is not None
    assert (failed.who, failed.message, passed) == (SECOND, "no sign of life for 10 s", 10)
    assert failed.at_s == 105.0


def test_a_silent_process_that_the_system_sees_at_work_has_the_time_of_a_stall() -> None:
    room = Room()
    room.seconds(5)
    room.beats[SECOND] = None
    for tick in range(59):
        room.signs[SECOND] = Sign(cpu_s=tick / 2)
        assert room.second() is None
    room.signs[SECOND] = Sign(cpu_s=31.0)
    failed = room.second()
    assert failed is not None and failed.message == "no sign of life for 60 s"


def test_a_process_that_has_not_begun_to_beat_is_given_the_time_of_a_stall() -> None:
    room = Room()
    room.beats[SECOND] = None
    assert room.seconds(59) == (None, 59)
    assert room.second() is not None


def test_a_stopped_process_is_seen_though_idle_and_one_that_goes_on_is_not() -> None:
    room = Room()
    room.seconds(5)
    for count in (4, 100):
        room.beats[FIRST], room.signs[FIRST] = None, Sign(stopped=True)
        failed, passed = room.seconds(count)
        if count == 4:
            assert failed is None
            assert room.vitals.silent() == [FIRST]
            room.say(FIRST)
            room.signs[FIRST] = Sign()
            room.seconds(3)
            assert room.vitals.silent() == []
    assert failed is not None and passed == 6
    assert (failed.who, failed.message[:19]) == (FIRST, "stopped by a signal")


def test_the_first_of_two_is_named() -> None:
    room = Room()
    room.seconds(5)
    room.beats[SECOND] = None
    room.seconds(2)
    room.beats[FIRST] = None
    failed, _ = room.seconds(60)
    assert failed is not None and failed.who == SECOND


def test_a_main_loop_that_does_not_turn_is_a_stall_though_it_beats() -> None:
    room = Room()
    room.seconds(5)
    room.turning.clear()
    room.say("engine", turns=7, where="engine/loop.py _turn:190")
    failed, passed = room.seconds(100)
    assert failed is not None and passed == 61
    assert failed.message == "stalled for 60 s, at engine/loop.py _turn:190"


def test_work_that_nobody_gets_on_with_is_a_stall_of_who_holds_it_up() -> None:
    room = Room()
    room.seconds(1000)
    room.say("engine", doing="work for 2 plans in flight", turns=0)
    room.say(FIRST, doing="plan 7", where="layers/decoder.py forward:50")
    room.say(SECOND, doing="plan 7", waits=True, where="worker/edge.py wait:72")
    failed, passed = room.seconds(100)
    assert failed is not None and passed == 61
    assert failed.who == FIRST
    assert failed.message == "stalled for 60 s in plan 7, at layers/decoder.py forward:50"


def test_a_rank_that_has_not_taken_its_plan_in_is_named_and_not_who_waits_for_it() -> None:
    room = Room()
    room.say("engine", doing="work for 1 plans in flight", turns=0)
    room.say(FIRST, done=7, where="worker/loop.py _patience_ms:160")
    room.say(SECOND, doing="plan 7", done=7, waits=True)
    failed, _ = room.seconds(100)
    assert failed is not None
    assert (failed.who, failed.message) == (FIRST, "stalled for 60 s, at worker/loop.py _patience_ms:160")


def test_a_rank_that_has_done_its_part_is_not_named_for_one_that_waits() -> None:
    room = Room()
    room.say("engine", doing="work for 1 plans in flight", turns=0)
    room.say(FIRST, done=8)
    room.say(SECOND, doing="plan 7", done=7, waits=True)
    failed, _ = room.seconds(100)
    assert failed is not None and failed.who == SECOND


def test_of_a_stall_with_one_that_does_not_run_that_one_is_named() -> None:
    room = Room(Limits(stall_s=4.0))
    room.say("engine", doing="work for 1 plans in flight", turns=0)
    room.say(SECOND, doing="plan 7", waits=True)
    room.second()
    room.beats[FIRST], room.signs[FIRST] = None, Sign(cpu_s=1.0)
    failed, _ = room.seconds(100)
    assert failed is not None
    assert (failed.who, failed.message) == (FIRST, "no sign of life for 4 s")


def test_progress_anywhere_is_no_stall() -> None:
    room = Room()
    room.say(FIRST, doing="preparing to run plans")
    for done in range(200):
        room.say(SECOND, doing="loading weights", done=done // 50)
        assert room.second() is None, "a slow node still loading"


def test_a_long_step_that_computes_is_no_stall_until_a_steps_time_is_over() -> None:
    room = Room()
    room.say("engine", doing="work for 1 plans in flight", turns=0)
    room.say(FIRST, doing="plan 3", at_work=True)
    room.say(SECOND, doing="plan 3", waits=True)
    failed, passed = room.seconds(2000)
    assert failed is not None and passed == 601
    assert failed.who == FIRST


def test_a_step_that_stops_to_compute_is_a_stall() -> None:
    room = Room()
    room.say(FIRST, doing="plan 3", at_work=True)
    assert room.seconds(200) == (None, 200)
    room.say(FIRST, doing="plan 3")
    failed, passed = room.seconds(2000)
    assert failed is not None and passed == 60
    assert failed.message == "stalled for 259 s in plan 3"


def test_a_watch_that_was_itself_stopped_blames_nobody() -> None:
    room = Room()
    room.say(FIRST, doing="plan 3")
    room.seconds(30)
    room.now += 10_000
    assert room.vitals.check(room.signs) is None
    failed, passed = room.seconds(100)
    assert failed is not None and 28 <= passed <= 31


def test_complaints_lead_to_who_does_not_run_then_to_who_does_not_get_on() -> None:
    room = Room()
    assert room.vitals.suspect() is None
    room.say(FIRST, doing="plan 3", waits=True)
    room.say(SECOND, doing="plan 2")
    room.seconds(9)
    suspect = room.vitals.suspect()
    assert suspect is not None and suspect.message == "stalled for 8 s in plan 2"
    room.beats[FIRST] = None
    room.seconds(4)
    suspect = room.vitals.suspect()
    assert suspect is not None and (suspect.who, suspect.message) == (FIRST, "no sign of life for 4 s")


SECONDS = st.tuples(
    st.sampled_from([FIRST, SECOND]), st.booleans(), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 80)
)


@given(st.lists(SECONDS, max_size=15))
def test_a_stall_is_told_only_after_its_time_without_progress_and_always_by_then(
    story: list[tuple[str, bool, int, bool, bool, int]],
) -> None:
    room = Room()
    quiet = calm = 0
    """Seconds with work in hand since anything was done; and since anybody was at work, too."""
    done = dict.fromkeys([FIRST, SECOND], 0)
    for who, busy, more, waits, at_work, count in story:
        done[who] += more
        was_busy = any(beat is not None and beat.doing for beat in room.beats.values())
        room.say(who, doing="plan" if busy else "", done=done[who], waits=waits, at_work=at_work and busy and not waits)
        is_busy = any(beat is not None and beat.doing for beat in room.beats.values())
        if more or (is_busy and not was_busy):
            quiet = calm = -1
        for _ in range(count):
            works = any(beat is not None and beat.at_work for beat in room.beats.values())
            quiet, calm = quiet + 1, 0 if works else calm + 1
            failed = room.second()
            if not is_busy:
                assert failed is None
                continue
            if failed is not None:
                assert calm >= 60 or quiet >= 600
                return
            assert calm < 61 and quiet < 601
