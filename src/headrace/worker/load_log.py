"""How loading goes, in a rank's own log: bytes and rate, now and then, and at the end of what took longer than that."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.supervise.screen import LINE_PERIOD_S, progress_text


class LoadLog:
    """Says a line through `say` every `LINE_PERIOD_S` while bytes come, one more at the end."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._began: tuple[float, int] | None = None
        self._said_s = 0.0

    def progress(self, done: int, total: int) -> None:
        """Take in how far loading is, in bytes."""
        now = self._clock()
        if self._began is None:
            self._began, self._said_s = (now, done), now
        began_s, before = self._began
        if now - self._said_s >= LINE_PERIOD_S or (done >= total and self._said_s > began_s):
            self._said_s = now
            self._say(progress_text("loading weights", done, total, (done - before, now - began_s)))
