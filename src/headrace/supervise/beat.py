"""A child's heartbeat: once a second a thread says that the process runs, what it has in hand, and whether it works."""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from headrace.supervise.child import Beat, Reporter

BEAT_PERIOD_S = 1.0
AT_WORK = 0.1
"""Share of one processor from which on a process is taken to compute: a machine may have more to do than cores."""
WAITS = ("layers/axis.py ", "worker/edge.py ", "worker/comm.py ", "worker/prepare.py _together")
"""Where a rank waits for other ranks, as `where_in` says it."""

_PACKAGE = f"{Path(__file__).parents[1]}/"


class Work(NamedTuple):
    """What a process has in hand."""

    doing: str = ""
    """In words for a message; empty where it has nothing to do."""
    done: int = 0
    """Changes with whatever gets done: steps, bytes."""
    inside: bool = False
    """Whether the main thread itself is to get it done now, and does not merely look whether a device has."""
    turns: int = -1
    """Turns of its main loop, which never pauses for long; -1 for a process that may."""


class Pulse:
    """What the beats say: set by the main thread, read by the thread that beats."""

    def __init__(self) -> None:
        self._look: Callable[[], Work] = Work

        self._count = 0

    def say(self, doing: str) -> None:
        """The main thread works at this from here on, which is progress; "" for nothing."""
        self._count += 1
        work = Work(doing, self._count, inside=True)
        self._look = lambda: work

    def follow(self, look: Callable[[], Work]) -> None:
        """From here on the beats ask for themselves; `look` runs in another thread and must hold for that."""
        self._look = look

    def work(self) -> Work:
        """What is in hand now."""
        return self._look()


class Effort(NamedTuple):
    """What the system has counted for this process and for the children that it awaited."""

    cpu_s: float
    reads: int
    """Page faults and blocks that came from a disk."""

    @classmethod
    def now(cls) -> Effort:
        """So far."""
        own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        cpu_s = own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
        return cls(cpu_s, own.ru_majflt + own.ru_inblock)

    def is_work_since(self, before: Effort, seconds: float) -> bool:
        """Whether it is more than waiting takes."""
        return self.cpu_s - before.cpu_s >= AT_WORK * seconds or self.reads > before.reads


def start_beating(who: str, reporter: Reporter, pulse: Pulse) -> None:
    """Beat from now until the process ends; call it in the main thread, whose place the beats tell."""
    if reporter.attached:
        main = threading.get_ident()
        threading.Thread(target=_beat, args=(who, reporter, pulse, main), name="beat", daemon=True).start()


def _beat(who: str, reporter: Reporter, pulse: Pulse, main: int) -> None:
    before, before_s, work = Effort.now(), time.monotonic(), Work()
    while reporter.attached:
        try:
            work = pulse.work()
        except (IndexError, RuntimeError):
            pass  # the main thread changed what was looked at; the next beat sees it whole
        effort, now = Effort.now(), time.monotonic()
        where = where_in(sys._current_frames().get(main))
        waits = where.startswith(WAITS)
        at_work = work.inside and not waits and effort.is_work_since(before, now - before_s)
        reporter.report(Beat(who, work.doing, work.done, work.turns, waits, at_work, where))
        before, before_s = effort, now
        time.sleep(BEAT_PERIOD_S)


def where_in(frame: FrameType | None) -> str:
    """The innermost of our own functions on a stack: `worker/edge.py wait:72`; empty where there is none."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            return f"{code.co_filename.removeprefix(_PACKAGE)} {code.co_name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
