"""Who of the processes is stopped, silent or stalled: told by their beats, by the system, and by a clock.

Two signals. A beat says that a process runs: one without is lost, whether there is work or not. Progress says that work
gets done: it matters only where some is in hand, and any process's progress counts for all, since those that wait for a
long step of one stage wait rightly. A step that takes long is no stall either while its process is seen to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.config import RunConfig
from headrace.step import Failed
from headrace.supervise.child import Beat

SUSPECT_S = 3.0
"""Silence that says who is behind what all others complain of."""
PAUSE_S = 5.0
"""A watch that did not look for so long was itself stopped: what it did not see is nobody's fault."""
WORKING_S = 5.0
"""A silent process is given more time while the system saw it compute or read within so many seconds."""
RANK = "worker rank "
"""How the names of ranks begin."""
AT_WORK = 0.05
"""Share of one processor that counts as computing there."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds after which a process or its work is given up."""

    stall_s: float = 60.0
    """Work in hand, and nothing done anywhere; nobody computes either."""
    step_s: float = 600.0
    """The same while somebody is seen to compute: the longest step."""
    silent_s: float = 10.0
    """No beat, and no work seen by the system; one that is seen to work has `stall_s`, as has a first beat."""
    stopped_s: float = 4.0
    """Stopped by a signal: found a second later at most, so that all is over within ten."""


def limits_of(run: RunConfig) -> Limits:
    """As configured."""
    return Limits(stall_s=run.stall_timeout_s, step_s=run.timeout_s)


class Sign(NamedTuple):
    """What the system says of a process."""

    stopped: bool = False
    cpu_s: float = 0.0
    read_bytes: int = 0


@dataclass
class _One:
    heard_s: float
    """When its last beat came, or the watch began."""
    moved_s: float
    """When it last got something done, or got something to do."""
    turned_s: float
    """When its main loop last turned."""
    worked_s: float
    """When the system last saw it work."""
    stopped_s: float | None = None
    """Since when it has been stopped."""
    beat: Beat | None = None
    sign: Sign = field(default_factory=Sign)

    def shift(self, seconds: float) -> None:
        self.heard_s += seconds
        self.moved_s += seconds
        self.turned_s += seconds
        self.worked_s += seconds
        if self.stopped_s is not None:
            self.stopped_s += seconds


class Vitals:
    """The state of every process of a group. `check` is to be called about once a second."""

    def __init__(self, names: Iterable[str], limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        now = clock()
        self._limits, self._clock = limits, clock
        self._all = {who: _One(now, now, now, now) for who in names}
        self._moved_s = self._worked_s = self._checked_s = now
        self._busy = False

    def hear(self, events: Iterable[object]) -> None:
        """Take in the beats among what was reported."""
        for event in events:
            if isinstance(event, Beat) and event.who in self._all:
                self._take(self._all[event.who], event, self._clock())

    def _take(self, one: _One, beat: Beat, now: float) -> None:
        before = one.beat or Beat(beat.who)
        one.heard_s, one.beat, one.stopped_s = now, beat, None
        if beat.turns != before.turns:
            one.turned_s = now
        if beat.done != before.done or bool(beat.doing) != bool(before.doing):
            one.moved_s = now
        if beat.done != before.done:
            self._moved_s = now
        if beat.at_work:
            self._worked_s = now
        busy = any(each.beat is not None and each.beat.doing for each in self._all.values())
        if busy and not self._busy:
            self._moved_s = now
        self._busy = busy

    def check(self, signs: Mapping[str, Sign]) -> Failed | None:
        """Look at everyone; the first thing that went wrong, if something did. `signs` are of those that live."""
        now = self._clock()
        pause = now - self._checked_s
        if pause > PAUSE_S:
            for one in self._all.values():
                one.shift(pause)
            self._moved_s, self._worked_s = self._moved_s + pause, self._worked_s + pause
        for who, sign in signs.items():
            self._look(self._all[who], sign, now, now - self._checked_s)
        self._checked_s = now
        found = [*(self._alone(who, now) for who in signs), self._stall(now)]
        return min((each for each in found if each is not None), key=lambda each: each.at_s, default=None)

    def _look(self, one: _One, sign: Sign, now: float, seconds: float) -> None:
        if not sign.stopped:
            one.stopped_s = None
        elif one.stopped_s is None:
            one.stopped_s = now
        if sign.cpu_s - one.sign.cpu_s > AT_WORK * seconds or sign.read_bytes > one.sign.read_bytes:
            one.worked_s = now
        one.sign = sign

    def _alone(self, who: str, now: float) -> Failed | None:
        """What is wrong with one process by itself."""
        one, limits = self._all[who], self._limits
        if one.stopped_s is not None and now - one.stopped_s >= limits.stopped_s:
            return Failed(who, _stopped(now - one.stopped_s), at_s=one.stopped_s)
        silence = now - one.heard_s
        patient = one.beat is None or now - one.worked_s < WORKING_S
        if silence >= (max(limits.stall_s, limits.silent_s) if patient else limits.silent_s):
            return Failed(who, f"no sign of life for {silence:.0f} s{_last(one.beat)}", at_s=one.heard_s)
        if one.beat is not None and one.beat.turns >= 0 and now - one.turned_s >= limits.stall_s:
            return _not_running(who, one, now) or Failed(
                who, f"stalled for {now - one.turned_s:.0f} s{_where(one.beat)}", at_s=one.turned_s
            )
        return None

    def _stall(self, now: float) -> Failed | None:
        limits, idle = self._limits, now - self._moved_s
        unseen = now - max(self._moved_s, self._worked_s)
        if not self._busy or (unseen < limits.stall_s and idle < max(limits.step_s, limits.stall_s)):
            return None
        absent = self._absent(now)
        if absent is not None:
            return absent
        who = self._slowest()
        assert who is not None
        return Failed(who, _stalled(idle, self._all[who].beat), at_s=self._moved_s)

    def _slowest(self) -> str | None:
        """Whose work is in the way: not one that waits for another rank, nor the engine, which waits for all.

        Where all wait it is a rank with nothing in hand: plans go to every rank, and it has not taken its own in.
        """
        busy = [who for who, one in self._all.items() if one.beat is not None and one.beat.doing]
        idle = self._idle_behind(busy)
        if idle is not None:
            return idle

        def order(who: str) -> tuple[bool, bool, float]:
            one = self._all[who]
            assert one.beat is not None
            return one.beat.turns >= 0, one.beat.waits, one.moved_s

        return min(busy, key=order, default=None)

    def _idle_behind(self, busy: Iterable[str]) -> str | None:
        """A rank without work that has done no more than those that all wait for another."""
        beats = {who: one.beat for who, one in self._all.items() if one.beat is not None and who.startswith(RANK)}
        waiting = [beats[who] for who in busy if who in beats]
        if not waiting or not all(beat.waits for beat in waiting):
            return None
        least = min(beat.done for beat in waiting)
        behind = [who for who, beat in beats.items() if not beat.doing and beat.done <= least]
        return min(behind, key=lambda who: self._all[who].moved_s, default=None)

    def _absent(self, now: float) -> Failed | None:
        """Who does not run at all, the longest of them."""
        found = [_not_running(who, one, now) for who, one in self._all.items()]
        return min((each for each in found if each is not None), key=lambda each: each.at_s, default=None)

    def silent(self) -> list[str]:
        """Names of those that are stopped, have not been heard for a while, or do not get on though they should.

        Sooner than `check` gives up: what it names may still come back.
        """
        now, late_s = self._clock(), self._limits.stall_s / 2
        names = [who for who, one in self._all.items() if _is_quiet(one, now, late_s)]
        who = self._slowest()
        if who is not None and who not in names and now - max(self._moved_s, self._worked_s) >= late_s:
            names.append(who)
        return names

    def suspect(self) -> Failed | None:
        """Who is likely behind it when all that is known are complaints about others.

        First who does not run at all, then who has work in its own hands and does not get on; the longest of each.
        """
        now = self._clock()
        absent = self._absent(now)
        if absent is not None:
            return absent
        found = [
            Failed(who, _stalled(now - one.moved_s, one.beat), at_s=one.moved_s)
            for who, one in self._all.items()
            if one.beat is not None and _is_in_hand(one.beat) and now - one.moved_s >= SUSPECT_S
        ]
        return min(found, key=lambda each: each.at_s, default=None)

    def beats(self) -> dict[str, Beat | None]:
        """The last beat of everyone, for the record."""
        return {who: one.beat for who, one in self._all.items()}


def _is_quiet(one: _One, now: float, late_s: float) -> bool:
    """Whether a process does not run, or its main loop has not turned for `late_s`."""
    if one.stopped_s is not None or one.beat is None:
        return one.stopped_s is not None
    return now - one.heard_s >= SUSPECT_S or (one.beat.turns >= 0 and now - one.turned_s >= late_s)


def _not_running(who: str, one: _One, now: float) -> Failed | None:
    """What to say of a process that is stopped, or has beaten and does so no more: not what it was at before."""
    if one.stopped_s is not None:
        return Failed(who, _stopped(now - one.stopped_s), at_s=one.stopped_s)
    if one.beat is not None and now - one.heard_s >= SUSPECT_S:
        return Failed(who, f"no sign of life for {now - one.heard_s:.0f} s{_last(one.beat)}", at_s=one.heard_s)
    return None


def _is_in_hand(beat: Beat) -> bool:
    """Whether a rank has work that is not held up by another's."""
    return bool(beat.doing) and beat.turns < 0 and not beat.waits


def _stopped(seconds: float) -> str:
    return f"stopped by a signal (SIGSTOP, SIGTSTP or a debugger) for {seconds:.0f} s"


def _stalled(seconds: float, beat: Beat | None) -> str:
    doing = f" in {beat.doing}" if beat is not None and beat.doing else ""
    return f"stalled for {seconds:.0f} s{doing}{_where(beat)}"


def _where(beat: Beat | None) -> str:
    return f", at {beat.where}" if beat is not None and beat.where else ""


def _last(beat: Beat | None) -> str:
    return f", last at {beat.where}" if beat is not None and beat.where else ""
