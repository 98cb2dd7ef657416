"""What a process says of itself: beats, where it is, and what counts as work."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.supervise import beat
from headrace.supervise.beat import WAITS, Effort, Pulse, Work, start_beating, where_in
from headrace.supervise.child import Beat, Reporter, decode_report
from headrace.worker.loop import Worker


@pytest.fixture
def pipe() -> Iterator[tuple[int, Reporter]]:
    """The read end, and who writes on the other."""
    read, write = os.pipe()
    reporter = Reporter(write)
    yield read, reporter
    reporter.detach()  # which ends the thread that beats, at its next one
    os.close(read)
    os.close(write)


def test_beats_say_what_is_in_hand(pipe: tuple[int, Reporter]) -> None:
    pulse = Pulse()
    pulse.say("loading weights")
    start_beating("w", pipe[1], pulse)
    said = decode_report(os.read(pipe[0], 4096).splitlines()[0])
    assert isinstance(said, Beat)
    assert (said.who, said.doing, said.done, said.turns) == ("w", "loading weights", 1, -1)


def test_a_look_that_fails_in_between_is_one_beat_old(
    pipe: tuple[int, Reporter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beat, "BEAT_PERIOD_S", 0.0)
    looks: Iterator[Work | Exception] = iter([Work("plan 1", 1), IndexError("deque"), Work("plan 2", 2)])

    def look() -> Work:
        found = next(looks, Work())
        if isinstance(found, Exception):
            raise found
        return found

    pulse = Pulse()
    pulse.follow(look)
    start_beating("w", pipe[1], pulse)
    seen = b""
    while seen.count(b"\n") < 4:
        seen += os.read(pipe[0], 4096)
    beats = [decode_report(line) for line in seen.splitlines()[:4]]
    assert [one.doing for one in beats if isinstance(one, Beat)] == ["plan 1", "plan 1", "plan 2", ""]


def test_without_a_supervisor_nothing_beats() -> None:
    before = threading.active_count()
    start_beating("w", Reporter(), Pulse())
    assert threading.active_count() == before


def test_new_work_is_progress() -> None:
    pulse = Pulse()
    pulse.say("connecting")
    before = pulse.work()
    pulse.say("connecting")
    assert pulse.work().done != before.done


@pytest.mark.parametrize(
    ("cpu_s", "reads", "works"), [(0.0, 0, False), (0.09, 0, False), (0.2, 0, True), (0.0, 1, True)]
)
def test_work_is_what_takes_a_processor_or_a_disk(cpu_s: float, reads: int, works: bool) -> None:
    assert Effort(5 + cpu_s, 7 + reads).is_work_since(Effort(5, 7), 1.0) == works
    assert Effort.now().cpu_s > 0


def test_a_place_is_our_innermost_function() -> None:
    assert where_in(None) == ""
    found: list[str] = []

    class Socket:
        def poll(self, _timeout_ms: int) -> bool:
            found.append(where_in(sys._getframe()))
            worker.stop()
            return False

        def send(self, _data: bytes) -> None:
            pass

    worker = Worker(Socket(), 0, 0, Path(), Pulse())  # type: ignore[arg-type]  # all that it uses
    worker.run()
    (place,) = found
    assert place.startswith("worker/loop.py _receive:")


def test_the_places_where_ranks_wait_are_there() -> None:
    root = Path(headrace.__file__).parent
    for place in WAITS:
        file, _, function = place.partition(" ")
        assert not function or f"def {function}(" in (root / file).read_text()
