"""Tasks in child processes: values as they come, and a named problem for what hangs, crashes or fails."""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.errors import Fault
from headrace.probe.task import Outcome, Task
from headrace.step import Failed
from headrace.supervise.child import Measured, Ready
from headrace.supervise.group import Exited, ProcessGroup
from headrace.supervise.launch import Command

START_S = 90.0
"""For processes to import what they need: on a cold disk that is what takes longest here."""
KILL_S = 5.0
"""A killed process that is still there after so long hangs in the driver."""
LAST_WORDS_S = 1.0
"""When one of several processes ends, for the others to say why."""
MOST_PROBLEMS = 3
"""Of one subject: what is broken everywhere is not worth a deadline each."""

Commands = Callable[[Sequence[Task]], Sequence[Command]]
"""The processes that run these tasks one after the other; all report what is wrong, the first also what it measured."""


def run_tasks(
    tasks: Sequence[Task],
    commands: Commands,
    *,
    begun: Callable[[Task], None] = lambda _task: None,
    start_s: float = START_S,
) -> Iterator[Outcome]:
    """Every task's outcome, in order, as they come; `begun` is called before each.

    All run in one set of processes. After a problem those that are left run in a new one, for what a failed measurement
    leaves behind (memory, a broken context) is its process's.
    """
    left, problems, lost = deque(tasks), Counter[str](), set[str]()
    while left:
        task = left[0]
        if problems[task.subject] >= MOST_PROBLEMS or task.about in lost:
            why = f"{task.about} does not work" if task.about in lost else f"{MOST_PROBLEMS} like it went wrong"
            yield Outcome(left.popleft(), None, f"not tried, for {why}", tried=False)
            continue
        begun(task)
        for outcome in _one_run(list(left), commands(list(left)), begun, start_s):
            left.popleft()
            if outcome.fields is None:
                problems[outcome.task.subject] += 1
                lost |= {outcome.task.about} if outcome.task.vital else set()
            yield outcome


def _one_run(
    tasks: Sequence[Task], commands: Sequence[Command], begun: Callable[[Task], None], start_s: float
) -> Iterator[Outcome]:
    """Outcomes up to the first problem; all of them, where the processes do not even come up."""
    run = _Run(commands)
    try:
        if problem := run.start(start_s):
            yield Outcome(tasks[0], None, problem + run.end())
            yield from (Outcome(task, None, "not tried, for the same reason", tried=False) for task in tasks[1:])
            return
        for i, task in enumerate(tasks):
            if i:
                begun(task)
            fields, problem = run.next(task.deadline_s)
            yield Outcome(task, fields, problem + run.end() if fields is None else "")
            if fields is None:
                return
    finally:
        run.end()


class _Run:
    """One set of processes, from their start to their end."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._group = ProcessGroup(commands)
        self._num = len(commands)
        self._num_ready = 0
        self._measured: deque[Mapping[str, Any]] = deque()
        self._failed: list[Failed] = []
        self._died: list[Exited] = []
        self._left: list[Exited] = []
        """Without an error: wrong only if something is still missing when all have."""
        self._over = False

    def start(self, timeout_s: float) -> str:
        """Wait until all are up; what went wrong, else nothing."""
        try:
            self._group.start()
        except Fault as error:
            return str(error)
        return self._wait(lambda: self._num_ready == self._num, timeout_s, "did not come up")

    def next(self, timeout_s: float) -> tuple[Mapping[str, Any] | None, str]:
        """The next value, or what went wrong."""
        problem = self._wait(lambda: bool(self._measured), timeout_s, "no answer")
        return (None, problem) if problem else (self._measured.popleft(), "")

    def end(self) -> str:
        """Kill and reap what is left; in words what cannot be killed. Idempotent."""
        if self._over:
            return ""
        self._over = True
        self._group.kill()
        ends = time.monotonic() + KILL_S
        while self._group.pids and time.monotonic() < ends:
            self._group.wait(0.05)
        if pids := list(self._group.pids.values()):
            # Not closed: that would wait for them again.
            return (
                f"; process {pids[0]} hangs in the driver and cannot be killed, only a restart of the machine ends it"
            )
        self._group.close()
        return ""

    def _wait(self, done: Callable[[], bool], timeout_s: float, otherwise: str) -> str:
        ends = time.monotonic() + timeout_s
        while not done():
            if self._failed or self._died or (self._left and not self._group.pids):
                return self._why()
            left = ends - time.monotonic()
            if left <= 0:
                return f"{otherwise} within {timeout_s:g} s, killed"
            self._take(left)
        return ""

    def _take(self, timeout_s: float) -> None:
        for event in self._group.wait(timeout_s):
            if isinstance(event, Ready):
                self._num_ready += 1
            elif isinstance(event, Measured):
                self._measured.append(event.fields)
            elif isinstance(event, Failed):
                self._failed.append(event)
            elif isinstance(event, Exited):
                (self._died if event.returncode else self._left).append(event)

    def _why(self) -> str:
        """The root cause: what a process says of itself before what it says of others, and before a bare end."""
        ends = time.monotonic() + LAST_WORDS_S
        while (self._num > 1 or not self._failed) and (left := ends - time.monotonic()) > 0 and self._group.pids:
            self._take(left)
        if self._failed:
            return min(self._failed, key=lambda failed: failed.secondary).message
        code = (self._died or self._left)[0].returncode
        return (
            f"its process was ended by {signal.Signals(-code).name}" if code < 0 else f"its process ended with {code}"
        )
