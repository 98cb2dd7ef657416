"""Where a step's time goes, on clocks that the test moves: a host's, and a device whose events pass in its own time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker import clock
from headrace.worker.clock import DeviceClocks, HostClocks, Part, StepTimes


class Time:
    """Nanoseconds that pass when told to."""

    now = 0

    def monotonic_ns(self) -> int:
        return self.now


@dataclass
class Stream:
    """What is issued to it comes to pass when the test says."""

    time: Time
    at: int = 0
    made: list[Event] = field(default_factory=list)
    sent_at: int = 0
    """Where the stream of its sends is."""


class Event:
    """As PyTorch's: recorded in a stream, passed when the device has come there."""

    made: list[Event] = []  # noqa: RUF012  # the test empties it

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.made.append(self)

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.at

    def query(self) -> bool:
        return self.stream.time.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "both events must have passed"
        return (other.at - self.at) * 1e-6


@pytest.fixture(scope="module")
def time() -> Iterator[Time]:
    made = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "time", made)
        yield made


@pytest.fixture(scope="module")
def stream(time: Time) -> Iterator[Stream]:
    made = Stream(time)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", SimpleNamespace(Event=Event, current_stream=lambda: made))
        yield made


# --- a host ---------------------------------------------------------------------------------------------------------

durations = st.integers(0, 10**9)


@given(steps=st.lists(st.tuples(st.booleans(), st.lists(durations, min_size=7, max_size=7)), max_size=10))
def test_a_hosts_parts_fill_its_time_from_each_plans_arrival(time: Time, steps: list[tuple[bool, list[int]]]) -> None:
    clocks = HostClocks()
    truth = [0] * len(Part)
    edge, first = 0, time.now
    free = first
    for in_hand, (idle, messages, taking, tokens, activations, computing, sending) in steps:
        # A plan that was in hand when the one before ended, or one that came later.
        taken = free - 7 if in_hand and free > first else free + idle
        time.now = max(free, taken) + messages
        one = clocks.start(taken)
        for part, spent in (
            (Part.TOKENS, taking), (Part.ACTIVATIONS, tokens), (Part.BUSY, activations), (Part.COMMUNICATION, computing)
        ):  # fmt: skip
            time.now += spent
            one.enter(part)
        start, end = time.now - computing, time.now
        time.now += sending
        one.sent(None)
        one.stop()
        assert one.is_done()
        assert one.account() == StepTimes(start, end, tokens, activations)
        for part, spent in zip(Part, (taking + computing, tokens, activations, messages + sending), strict=True):
            truth[part] += spent
        edge += sending
        free = time.now
    assert (clocks.spent_ns, clocks.edge_ns) == (truth, edge)


def test_without_waits_and_sends_a_step_is_busy(time: Time) -> None:
    clocks = HostClocks()
    time.now = 100
    one = clocks.start(100)
    one.enter(Part.BUSY)
    time.now = 150
    one.stop()
    assert one.account() == StepTimes(100, 150, 0, 0)
    assert clocks.spent_ns == [50, 0, 0, 0] and clocks.settle()


# --- a device -------------------------------------------------------------------------------------------------------


@dataclass
class Issued:
    """A step on the device as it truly was."""

    clock: clock.DeviceClock
    wait: Part | None
    waits: int
    gap: int
    busy: int
    start: int
    end: int
    sent: int
    """When its send ends; 0 for none."""


def issue(clocks: DeviceClocks, stream: Stream, wait: Part | None, times: tuple[int, ...], *, sends: bool) -> Issued:
    gap, taking, waits, computing, sending = times
    before = stream.at
    if gap:  # the host issues it when the step before has ended
        stream.time.now = max(stream.time.now, stream.at + gap)
    stream.at = max(stream.at, stream.time.now)
    gap = stream.at - before
    one = clocks.start(0)
    stream.at += taking
    if wait is not None:
        one.enter(wait)
        stream.at += waits
    one.enter(Part.BUSY)
    start = stream.at
    stream.at += computing
    sent = stream.at + sending
    if sends:
        # All sends of a rank go through one stream, and end in order.
        sent = stream.sent_at = max(sent, stream.sent_at)
        one.enter(Part.COMMUNICATION)
        one.sent(Stream(stream.time, sent))  # type: ignore[arg-type]  # as much of it as is looked at
    else:
        one.sent(None)
    one.stop()
    waits = waits if wait is not None else 0
    return Issued(one, wait, waits, gap, taking + computing, start, stream.at, sent if sends else 0)


micro = st.integers(0, 5000).map(lambda us: us * 1000)
device_steps = st.tuples(st.sampled_from([None, Part.TOKENS, Part.ACTIVATIONS]), st.tuples(*[micro] * 5), st.booleans())


@given(groups=st.lists(st.tuples(st.lists(device_steps, min_size=1, max_size=3), micro), max_size=6))
def test_a_devices_parts_are_those_of_its_stream(time: Time, stream: Stream, groups: list[tuple[list, int]]) -> None:  # type: ignore[type-arg]
    clocks = DeviceClocks()
    Event.made.clear()
    stream.at = time.now
    done: list[tuple[Issued, StepTimes]] = []
    for steps, lag in groups:
        # Several are issued ahead; the host looks when the last of them has been over for a while.
        flying = [issue(clocks, stream, wait, times, sends=sends) for wait, times, sends in steps]
        for one in flying:
            if time.now < one.end:
                assert not one.clock.is_done()
        time.now = max(time.now, stream.at + lag)
        for one in flying:
            assert one.clock.is_done()
            done.append((one, one.clock.account()))
    time.now += 10**8
    assert clocks.settle()
    check_sums(clocks, [one for one, _ in done])
    for one, got in done:
        assert got.end_ns - got.start_ns <= one.end - one.start + 2
        assert got.end_ns <= time.now
    for (_, before), (_, after) in pairwise(done):
        assert before.end_ns <= after.start_ns - after.activations_wait_ns - after.tokens_wait_ns
    # Each of the three in flight, the one before and those whose sends are under way has a few.
    assert len(Event.made) <= 5 * 4 + sum(bool(one.sent) for one, _ in done)


def check_sums(clocks: DeviceClocks, steps: list[Issued]) -> None:
    def about(value: int) -> object:
        return pytest.approx(value, abs=8 * len(steps) + 1)

    assert clocks.spent_ns[Part.BUSY] == about(sum(one.busy for one in steps))
    for part in (Part.TOKENS, Part.ACTIVATIONS):
        assert clocks.spent_ns[part] == about(sum(one.waits for one in steps if one.wait is part))
    assert clocks.edge_ns == about(sum(one.sent - one.end for one in steps if one.sent))
    # While the stream had no plan: from a step's end to the end of its send, or to the next step.
    gaps = [(before, after.gap) for before, after in pairwise(steps)]
    assert clocks.spent_ns[Part.COMMUNICATION] == about(
        sum(min(gap, before.sent - before.end) for before, gap in gaps if before.sent)
    )


def test_a_host_that_looks_often_sees_steps_where_they_are(time: Time, stream: Stream) -> None:
    clocks = DeviceClocks()
    stream.at = time.now
    for _ in range(50):
        one = issue(clocks, stream, Part.TOKENS, (10_000, 0, 5_000, 100_000, 0), sends=False)
        while not one.clock.is_done():
            time.now += 1_000
        times = one.clock.account()
        assert abs(times.end_ns - one.end) <= 1_000 and abs(times.start_ns - one.start) <= 1_000


def test_events_are_made_once(time: Time, stream: Stream) -> None:
    clocks = DeviceClocks()
    Event.made.clear()
    stream.at = time.now
    for _ in range(100):
        one = issue(clocks, stream, Part.TOKENS, (0, 0, 1000, 1000, 500), sends=True)
        time.now = stream.at + 1000
        assert one.clock.is_done()
        one.clock.account()
    # One step's five, and the end and the send of the one before.
    assert len(Event.made) == 7


def test_a_send_that_is_still_under_way_is_counted_when_it_ends(time: Time, stream: Stream) -> None:
    clocks = DeviceClocks()
    stream.at = time.now
    first = issue(clocks, stream, None, (0, 0, 0, 1000, 10**6), sends=True)
    second = issue(clocks, stream, None, (3000, 0, 0, 1000, 0), sends=False)
    time.now = stream.at
    for one in (first, second):
        assert one.clock.is_done()
        one.clock.account()
    assert not clocks.settle() and clocks.edge_ns == 0
    assert clocks.spent_ns[Part.COMMUNICATION] == pytest.approx(3000, abs=2)
    time.now += 10**6
    assert clocks.settle() and clocks.edge_ns == pytest.approx(10**6, abs=2)
