"""Why a group of processes ended: one root cause out of what its members said and how they died."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.errors import Fault, UserError
from headrace.step import Failed
from headrace.supervise.group import Event, Exited, ProcessGroup

SETTLE_S = 0.5
"""How long the others may still speak after the first failure: a cause and its echoes arrive in any order."""
SETTLE_SECONDARY_S = 2.0
"""The same while all that is known are echoes: who died of a signal may be seen later, when its core is written."""


@dataclass(frozen=True)
class Failure:
    """The root cause: one line and whose fault it is."""

    who: str
    message: str
    user_error: bool

    @property
    def line(self) -> str:
        """The one line the user reads. What the user asked for is wrong wherever it was noticed, so no name then."""
        return self.message if self.user_error else f"{self.who}: {self.message}"

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


def settle(group: ProcessGroup, events: Iterable[Event]) -> Failure:
    """Given the first failure among `events`, listen a little longer and name the root cause."""
    seen = failures_in(events)
    start = time.monotonic()
    while True:
        limit = SETTLE_S if any(_rank(event) < _SECONDARY for event in seen) else SETTLE_SECONDARY_S
        left = start + limit - time.monotonic()
        if left <= 0 or not group.pids:
            # Everyone is gone: what is left in the pipes is read at once.
            return root_cause(seen + failures_in(group.wait(0)))
        seen += failures_in(group.wait(left))


def root_cause(seen: Iterable[Failed | Exited]) -> Failure:
    """Choose among failures given in order of arrival; at least one.

    A death by signal and a user's error are causes in themselves; then comes what a process says of itself, then an
    exit without a word, then what is known to be an echo of somebody else's end. The earliest of the best kind wins.
    """
    ordered = list(seen)
    spoke = {event.who for event in ordered if isinstance(event, Failed)}
    causes = [e for e in ordered if isinstance(e, Failed) or e.returncode < 0 or e.who not in spoke]
    assert causes, "no failure to explain"
    cause = min(causes, key=_rank)
    if isinstance(cause, Failed):
        return Failure(cause.who, cause.message, cause.user_error)
    return Failure(cause.who, describe_exit(cause.returncode), False)


def describe_exit(returncode: int) -> str:
    """An exit in words; `returncode` as in subprocess."""
    if returncode >= 0:
        return f"ended without a report (exit code {returncode})"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        return f"killed by signal {-returncode}"
    return f"killed by signal {-returncode} ({name})"


_SECONDARY = 3


def _rank(event: Failed | Exited) -> int:
    if isinstance(event, Exited):
        return 0 if event.returncode < 0 else 2
    if event.user_error:
        return 0
    return _SECONDARY if event.secondary else 1
