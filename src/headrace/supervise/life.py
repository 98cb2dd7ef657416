"""A service's life as the service manager hears it: starting, loading, warming, ready, draining, failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Literal

from headrace.supervise.child import Progress
from headrace.supervise.notify import Notifier
from headrace.supervise.screen import Tally
from headrace.supervise.vitals import Limits

State = Literal["starting", "loading", "warming", "ready", "draining", "failed"]

START_TIMEOUT_S = 300
"""A start may take so long before the first byte of weights, and after the last: imports, compiling, warming up."""
FEEDS = 3
"""Words to the watchdog within its time: one may be late."""
STATUS_PERIOD_S = 1.0
FAULT_S = 30
"""A failure that is found is looked into, told and brought to its end in less."""


def watchdog_s(limits: Limits) -> int:
    """What the watchdog's time should be, so that the supervisor, which can say who is at fault, always comes first.

    It starves from the first doubt on, and has last been fed a third of its time before.
    """
    return ceil((max(limits.stall_s, limits.silent_s) + FAULT_S) * FEEDS / (FEEDS - 1))


class Life:
    """Says each change of state, progress once a second, and feeds the watchdog. Belongs to the supervisor's thread."""

    def __init__(self, notifier: Notifier, clock: Callable[[], float] = time.monotonic) -> None:
        self.state: State = "starting"
        self._notifier = notifier
        self._clock = clock
        self._tally = Tally()
        self._most: dict[str, int] = {}
        self._told_s = float("-inf")
        self._fed_s = float("-inf")
        self._ready_text = ""
        self._silent: tuple[str, ...] = ()

    def starting(self, text: str) -> None:
        """What goes on before there are processes: a model looked for, say."""
        self._notifier.send(STATUS=text)

    def progress(self, event: Progress) -> None:
        """Take in one process's progress. The start gets more time only where more has been done than ever before."""
        if self.state not in ("starting", "loading", "warming"):
            return
        done, total = self._tally.take(event)
        state: State = "loading" if done < total else "warming"
        now = self._clock()
        if state == self.state and now - self._told_s < STATUS_PERIOD_S:
            return
        self.state, self._told_s = state, now
        text = self._tally.text(event.text) if state == "loading" else "warming up"
        if done > self._most.get(event.text, 0):
            self._most[event.text] = done
            self._notifier.send(STATUS=text, EXTEND_TIMEOUT_USEC=START_TIMEOUT_S * 1_000_000)
        else:
            self._notifier.send(STATUS=text)

    def ready(self, text: str) -> None:
        """An inference went through every stage. `text` says where the service is."""
        self.state, self._ready_text, self._fed_s = "ready", text, self._clock()
        self._notifier.send(READY=1, STATUS=text, WATCHDOG=1)

    def tick(self, silent: Callable[[], Sequence[str]]) -> None:
        """Feed the watchdog when it is time and all is well; call it at least once a second.

        `silent` names the processes from which no sign of life comes, or whose work has stopped; while it names any the
        watchdog is not fed.
        """
        limit, now = self._notifier.watchdog_s, self._clock()
        if limit is None or self.state != "ready" or now - self._fed_s < limit / FEEDS:
            return
        names = tuple(silent())
        if not names:
            self._fed_s = now
            self._notifier.send(WATCHDOG=1)
        if names != self._silent:
            self._silent = names
            self._notifier.send(STATUS=f"no sign of life from {', '.join(names)}" if names else self._ready_text)

    def draining(self) -> None:
        """A stop was asked for."""
        self.state = "draining"
        self._notifier.send(STOPPING=1, STATUS="draining")

    def failed(self, line: str) -> None:
        """The root cause, which the manager shows until the next start."""
        self.state = "failed"
        self._notifier.send(STATUS=f"failed: {line}")
