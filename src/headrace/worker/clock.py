"""When a step's work began and ended, on the device that does it."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Clock(Protocol):
    """Started when it is made."""

    def stop(self) -> None:
        """All of the step's work has been issued."""
        ...

    def is_done(self) -> bool:
        """Whether the device has done it."""
        ...

    def span_ns(self) -> tuple[int, int]:
        """Begin and end, of the host's monotonic clock; once it is done."""
        ...


class HostClock:
    """For work that is done as it is issued."""

    def __init__(self) -> None:
        self._began = self._ended = time.monotonic_ns()

    def stop(self) -> None:
        """The work is done."""
        self._ended = time.monotonic_ns()

    def is_done(self) -> bool:
        """True once stopped."""
        return True

    def span_ns(self) -> tuple[int, int]:
        """Begin and end."""
        return self._began, self._ended


class DeviceClock:
    """Two events in the current stream: the first passes when the device comes to this step, inputs and all."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()

    def stop(self) -> None:
        """Everything issued by now belongs to the step."""
        self._end.record()

    def is_done(self) -> bool:
        """Whether the device has passed the end."""
        return self._end.query()

    def span_ns(self) -> tuple[int, int]:
        """Begin and end; the end is when it was found done, which a loop that polls does within microseconds."""
        ended = time.monotonic_ns()
        return ended - int(self._begin.elapsed_time(self._end) * 1e6), ended


def start_clock(device: torch.device) -> Clock:
    """A clock for the device."""
    return HostClock() if device.type == "cpu" else DeviceClock()
