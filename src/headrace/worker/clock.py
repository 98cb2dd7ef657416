"""Where a step's time goes: measured as it happens on a host, or by events in a device's stream that nobody waits for.

A step's time is cut into parts that follow each other without a gap, so they add up to the step whatever it does.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch


class Part(IntEnum):
    """What a rank's time with a plan goes into."""

    BUSY = 0
    TOKENS = 1
    """Sampled tokens have not come."""
    ACTIVATIONS = 2
    """Hidden states have not come."""
    COMMUNICATION = 3
    """Sends, and messages with the engine."""


class StepTimes(NamedTuple):
    """A step on the host's monotonic clock. Steps of one rank do not overlap, their waits included."""

    start_ns: int
    """All that it waited for is there."""
    end_ns: int
    """It is computed; on a processor, before it is sent on."""
    tokens_wait_ns: int
    """Wait that ends where the wait for activations begins."""
    activations_wait_ns: int
    """Wait that ends at the start."""


class Clock(Protocol):
    """Of one step. It begins busy: what comes before the waits takes the plan in."""

    def enter(self, part: Part) -> None:
        """From here on the time is this part's."""
        ...

    def sent(self, stream: torch.cuda.Stream | None) -> None:
        """The step's send has been given to `stream`, or to nobody who could tell when it ends."""
        ...

    def stop(self) -> None:
        """All of the step's work has been issued."""
        ...

    def is_done(self) -> bool:
        """Whether the device has done it."""
        ...

    def account(self) -> StepTimes:
        """Add the step to its rank's sums; once, when it is done, after the step before."""
        ...


class Clocks(Protocol):
    """Of one rank."""

    spent_ns: list[int]
    """By part, since start."""
    edge_ns: int
    """From the end of computing to the end of sending, since start."""
    last_end_ns: int
    """When the last step that is accounted for ended."""

    def start(self, taken_ns: int) -> Clock:
        """A step begins, whose plan was here at `taken_ns`."""
        ...

    def settle(self) -> bool:
        """Add the sends that have ended meanwhile; whether all have."""
        ...


class HostClocks:
    """For work that is done as it is issued."""

    def __init__(self) -> None:
        self.spent_ns = [0] * len(Part)
        self.edge_ns = 0
        self.last_end_ns = 0

    def start(self, taken_ns: int) -> HostClock:
        """What passed since the plan came and the step before ended went into messages."""
        now = time.monotonic_ns()
        self.spent_ns[Part.COMMUNICATION] += now - max(taken_ns, self.last_end_ns)
        return HostClock(self, now)

    def settle(self) -> bool:
        """Nothing is ever left open."""
        return True


class HostClock:
    """Of one step."""

    def __init__(self, owner: HostClocks, now_ns: int) -> None:
        self._owner = owner
        self._marks = [(Part.BUSY, now_ns)]
        self._end_ns = now_ns

    def enter(self, part: Part) -> None:
        """From here on the time is this part's."""
        self._marks.append((part, time.monotonic_ns()))

    def sent(self, stream: torch.cuda.Stream | None) -> None:
        """The send has taken the time since its part began; the library goes on by itself."""
        self._owner.edge_ns += time.monotonic_ns() - self._marks[-1][1]

    def stop(self) -> None:
        """The work is done."""
        self._owner.last_end_ns = self._end_ns = time.monotonic_ns()

    def is_done(self) -> bool:
        """True once stopped."""
        return True

    def account(self) -> StepTimes:
        """Add the step to its rank's sums."""
        spent = [0] * len(Part)
        start = end = 0
        for (part, begin), (_, following) in pairwise([*self._marks, (Part.BUSY, self._end_ns)]):
            spent[part] += following - begin
            if part is Part.BUSY:
                start, end = begin, following
        self._owner.spent_ns = [sum(both) for both in zip(self._owner.spent_ns, spent, strict=True)]
        return StepTimes(start, end, spent[Part.TOKENS], spent[Part.ACTIVATIONS])


@dataclass(slots=True)
class _Ended:
    """A step that is accounted for, while its send may be under way."""

    end: torch.cuda.Event
    sent: torch.cuda.Event | None
    """None once the send has ended too, or where there is none."""
    edge_ns: int = 0


class DeviceClocks:
    """For work in the current stream: a part begins when the stream comes to its event, and nobody waits for that.

    Sends run beside the stream and take none of its time. They count as communication only while the stream has no
    plan: from the end of a step to the end of its send or the begin of the next step, whichever comes first.
    """

    def __init__(self) -> None:
        self.spent_ns = [0] * len(Part)
        self.edge_ns = 0
        self._free: list[torch.cuda.Event] = []
        self._previous: _Ended | None = None
        self._sending: deque[_Ended] = deque()
        self._newest: torch.cuda.Event | None = None
        """End of the step that was issued last."""
        self.last_end_ns = 0

    def start(self, taken_ns: int) -> DeviceClock:
        """The step begins when the stream comes to it; when its plan came does not matter to the device."""
        return DeviceClock(self, torch.cuda.current_stream())

    def begin(self, stream: torch.cuda.Stream) -> torch.cuda.Event | None:
        """Where a step begins, or None where it follows the one before without a gap: an event takes a stream 3 us."""
        waited = self._newest is None or self._newest.query()
        return self.record(stream) if waited else None

    def end(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Where a step ends, in the order in which steps are issued."""
        self._newest = self.record(stream)
        return self._newest

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event at the stream's end. Events are used again: making one costs as much as recording one."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def settle(self) -> bool:
        """Add the sends that have ended meanwhile; whether all have."""
        while self._sending:
            one = self._sending[0]
            assert one.sent is not None
            if not one.sent.query():
                return False
            self._sending.popleft()
            # The step's end may have come to its stream after a short send had passed.
            one.edge_ns = max(0, _between(one.end, one.sent))
            self.edge_ns += one.edge_ns
            self._free.append(one.sent)
            one.sent = None
            if one is not self._previous:
                self._free.append(one.end)
        return True

    def account(
        self,
        begin: torch.cuda.Event | None,
        marks: list[tuple[Part, torch.cuda.Event]],
        end: torch.cuda.Event,
        sent: torch.cuda.Event | None,
        seen_ns: tuple[int, int],
    ) -> StepTimes:
        """Add a step whose events have passed. `seen_ns`: when it was last seen not done, and first seen done."""
        first = begin if begin is not None else self._end_before()
        marks = [(Part.BUSY, first), *marks]
        spent = [0] * len(Part)
        last = 0
        for (part, event), (_, following) in pairwise([*marks, (Part.BUSY, end)]):
            last = _between(event, following)
            spent[part] += last
        self.settle()
        gap, previous = 0, self._previous
        if previous is not None:
            gap = max(0, _between(previous.end, marks[0][1]))
            spent[Part.COMMUNICATION] = gap if previous.sent is not None else min(gap, previous.edge_ns)
            if previous.sent is None:
                self._free.append(previous.end)
        times = self._times(gap, sum(spent) - spent[Part.COMMUNICATION], last, spent, seen_ns)
        self._free += [event for _, event in marks[int(begin is None) :]]
        self._previous = _Ended(end, sent)
        if sent is not None:
            self._sending.append(self._previous)
        self.spent_ns = [sum(both) for both in zip(self.spent_ns, spent, strict=True)]
        return times

    def _end_before(self) -> torch.cuda.Event:
        assert self._previous is not None
        return self._previous.end

    def _times(self, gap: int, step: int, computed: int, spent: list[int], seen_ns: tuple[int, int]) -> StepTimes:
        """Put a step onto the host's clock: behind the one before, and within what the host has seen of its end.

        When the host looks often it sees the end within microseconds; when it was kept elsewhere the device's own
        times keep several steps, found done at once, apart.
        """
        not_before, found = seen_ns
        behind = self.last_end_ns + gap + step if self._previous is not None else found
        free, end = self.last_end_ns, min(found, max(not_before, behind))
        start = max(free, end - computed)
        activations = min(spent[Part.ACTIVATIONS], start - free)
        tokens = min(spent[Part.TOKENS], start - free - activations)
        self.last_end_ns = end
        return StepTimes(start, end, tokens, activations)


class DeviceClock:
    """Of one step."""

    def __init__(self, owner: DeviceClocks, stream: torch.cuda.Stream) -> None:
        self._owner, self._stream = owner, stream
        self._begin = owner.begin(stream)
        self._marks: list[tuple[Part, torch.cuda.Event]] = []
        self._end: torch.cuda.Event | None = None
        self._sent: torch.cuda.Event | None = None
        self._not_before_ns = self._found_ns = 0

    def enter(self, part: Part) -> None:
        """From where the stream comes to here the time is this part's; sends are not in the stream."""
        if part is not Part.COMMUNICATION:
            self._marks.append((part, self._owner.record(self._stream)))

    def sent(self, stream: torch.cuda.Stream | None) -> None:
        """The send ends where that stream comes to here."""
        if stream is not None:
            self._sent = self._owner.record(stream)

    def stop(self) -> None:
        """Everything issued by now belongs to the step."""
        self._end = self._owner.end(self._stream)

    def is_done(self) -> bool:
        """Whether the device has passed the end."""
        assert self._end is not None
        asked_ns = time.monotonic_ns()
        if self._end.query():
            self._found_ns = time.monotonic_ns()
            return True
        self._not_before_ns = asked_ns
        return False

    def account(self) -> StepTimes:
        """Add the step to its rank's sums."""
        assert self._end is not None
        return self._owner.account(
            self._begin, self._marks, self._end, self._sent, (self._not_before_ns, self._found_ns)
        )


def make_clocks(device: torch.device) -> Clocks:
    """Clocks for the device."""
    return HostClocks() if device.type == "cpu" else DeviceClocks()


def _between(first: torch.cuda.Event, then: torch.cuda.Event) -> int:
    """Nanoseconds; both have passed."""
    return int(first.elapsed_time(then) * 1e6)
