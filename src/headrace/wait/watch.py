"""Waiting as such: look, say what is seen, end when it is ready, lost or too late. Knows no clock but the one given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

ROUNDING_S = 1e-6
"""Clocks add up with rounding errors: a wait that short is none."""

Verdict = Literal["ready", "failed", "timed out"]


@dataclass(frozen=True)
class Sight:
    """What one look at one side of an engine shows."""

    text: str
    """In a few words, for the heartbeat."""
    ready: bool = False
    """Whether nothing more is to be waited for on this side."""
    failed: bool = False
    """Whether it is of no use to wait on."""


class Side(Protocol):
    """One side from which an engine can be looked at: its process, its unit, its HTTP interface."""

    def look(self) -> Sight:
        """Look, within a few seconds. Raises UserError where a flag is wrong."""
        ...

    def last_lines(self) -> list[str]:
        """The latest lines of its log, if there is one."""
        ...


class Clock(Protocol):
    """Time, in seconds."""

    def now(self) -> float:
        """The time since anything."""
        ...

    def sleep(self, seconds: float) -> None:
        """Come back later."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How waiting ended."""

    verdict: Verdict
    elapsed_s: float
    text: str
    """Why, or what was seen last."""
    log: list[str] = field(default_factory=list)
    """The latest lines of the engine's log where it is not ready."""


def watch(
    sides: Sequence[Side],
    clock: Clock,
    *,
    every_s: float,
    timeout_s: float,
    say: Callable[[float, str], None],
) -> Outcome:
    """Look at every side until all are ready, one has failed, or the time is over.

    `say` gets each heartbeat: seconds since the start, and what is seen.
    """
    start = clock.now()
    while True:
        sights = [side.look() for side in sides]
        elapsed = clock.now() - start
        text = "; ".join(sight.text for sight in sights)
        for side, sight in zip(sides, sights, strict=True):
            if sight.failed:
                return Outcome("failed", elapsed, sight.text, _log(sides, side))
        if all(sight.ready for sight in sights):
            return Outcome("ready", elapsed, text)
        if elapsed >= timeout_s - ROUNDING_S:
            return Outcome("timed out", elapsed, text, _log(sides, sides[0]))
        say(elapsed, text)
        # In step with the start, however long looks take.
        due = (math.floor((elapsed + ROUNDING_S) / every_s) + 1) * every_s
        clock.sleep(max(ROUNDING_S, min(due, timeout_s) - elapsed))


def _log(sides: Sequence[Side], first: Side) -> list[str]:
    """The log of the side that failed, or of another that has one."""
    for side in (first, *sides):
        lines = side.last_lines()
        if lines:
            return lines
    return []
