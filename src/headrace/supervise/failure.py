"""Why a group of processes ended: one root cause out of what its members said and how they died."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.errors import Fault, UserError
from headrace.step import Failed
from headrace.supervise.group import Event, Exited, ProcessGroup

SETTLE_S = 0.5
"""How long the others may still speak after the first failure: a cause and its echoes arrive in any order."""
SETTLE_SECONDARY_S = 2.0
"""The same while all that is known are echoes: who died of a signal may be seen later, when its core is written."""
SEEN_LATE_S = 0.5
"""A death by signal was so much earlier than it is seen, by whom it tears down in time to speak first."""


@dataclass(frozen=True)
class Failure:
    """The root cause: one line and whose fault it is."""

    who: str
    message: str
    user_error: bool
    device: str = ""
    """What the process computes on, where that is its own."""

    @property
    def line(self) -> str:
        """The one line the user reads. What the user asked for is wrong wherever it was noticed, so no name then."""
        who = f"{self.who}, {self.device}" if self.device else self.who
        return self.message if self.user_error else f"{who}: {self.message}"

    @property
    def exit_code(self) -> int:
        """2 for the user's error, 1 for a fault."""
        return 2 if self.user_error else 1

    def error(self) -> UserError | Fault:
        """The failure as an exception to raise."""
        return UserError(self.line) if self.user_error else Fault(self.line)


def failures_in(events: Iterable[Event]) -> list[Failed | Exited]:
    """The events that mean that the group is lost: before a stop, any exit is one, even a clean exit."""
    return [event for event in events if isinstance(event, Failed | Exited)]


def settle(
    group: ProcessGroup, events: Iterable[Event], suspect: Callable[[], Failed | None] = lambda: None
) -> tuple[Failure, list[Failed | Exited]]:
    """Given the first failure among `events`, listen a little longer; the root cause, and all that was seen.

    suspect: who is behind it where nothing but echoes is heard.
    """
    seen = failures_in(events)
    start = time.monotonic()
    while True:
        limit = SETTLE_S if has_cause(seen) else SETTLE_SECONDARY_S
        left = start + limit - time.monotonic()
        if left <= 0 or not group.pids:
            # Everyone is gone: what is left in the pipes is read at once.
            seen += failures_in(group.wait(0))
            break
        seen += failures_in(group.wait(left))
    if not has_cause(seen):
        found = suspect()
        seen += [found] if found is not None else []
    return root_cause(seen), seen


def root_cause(seen: Iterable[Failed | Exited]) -> Failure:
    """Choose among failures; at least one. The first in time, not in order of arrival, is the cause.

    An exit without a word gives way to who said something, and what is known to be an echo of somebody else's end to
    everything. An exit behind a report adds nothing to it.
    """
    ordered = list(seen)
    causes = [event for event in ordered if not _is_echo(event, ordered)]
    assert causes, "no failure to explain"
    # The name decides between equals: an order of arrival says nothing.
    cause = min(causes, key=lambda event: (_kind(event), _time(event), event.who))
    if isinstance(cause, Failed):
        return Failure(cause.who, cause.message, cause.user_error)
    return Failure(cause.who, describe_exit(cause.returncode, for_memory=cause.for_memory), False)


def has_cause(seen: Sequence[Failed | Exited]) -> bool:
    """Whether anything among failures is more than an echo."""
    return any(_kind(event) < _SECONDARY and not _is_echo(event, seen) for event in seen)


def _is_echo(event: Failed | Exited, seen: Iterable[Failed | Exited]) -> bool:
    """Whether it is the exit of a process that said why."""
    return isinstance(event, Exited) and any(isinstance(other, Failed) and other.who == event.who for other in seen)


def describe_exit(returncode: int, *, for_memory: bool = False) -> str:
    """An exit in words; `returncode` as in subprocess. for_memory: see `Exited`."""
    if returncode >= 0:
        return f"ended without a report (exit code {returncode})"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        return f"killed by signal {-returncode}"
    why = "; the system ran out of memory and killed processes meanwhile" if for_memory else ""
    return f"killed by signal {-returncode} ({name}){why}"


_CAUSE, _WORDLESS, _SECONDARY = range(3)


def _kind(event: Failed | Exited) -> int:
    if isinstance(event, Exited):
        return _CAUSE if event.returncode < 0 else _WORDLESS
    return _SECONDARY if event.secondary else _CAUSE


def _time(event: Failed | Exited) -> float:
    # An abort is a library's own doing, often because a peer has gone; it takes no time to be seen.
    late = isinstance(event, Exited) and event.returncode < 0 and event.returncode != -signal.SIGABRT
    return event.at_s - SEEN_LATE_S if late else event.at_s
