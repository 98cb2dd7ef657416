"""A clock that tests move: sleeping passes at once, and whatever is due by then happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class FakeClock:
    """`events` are called when their second is reached."""

    def __init__(self, events: Mapping[float, Callable[[], None]] | None = None) -> None:
        self._now = 1000.0
        self._start = self._now
        self._events = dict(events or {})

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self._now += seconds
        for second in sorted(self._events):
            if self._now - self._start >= second:
                self._events.pop(second)()
