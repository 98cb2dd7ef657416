"""Who asks what and when: a burst, a closed loop, random arrivals at a rate, or those of a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from headrace.errors import UserError

NEVER = math.inf


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A request: when it comes, how long its prompt is and how many tokens it generates."""

    at_s: float
    input: int
    output: int


class Arrivals(Protocol):
    """Where requests come from."""

    @property
    def due_s(self) -> float:
        """When the next one comes; `NEVER` when none does before another is finished, or at all."""
        ...

    def take(self) -> Ask:
        """The request that is due."""
        ...

    def finished(self, now_s: float) -> None:
        """A request ended, which may let another come."""
        ...


class Open:
    """Requests that come when they come, whatever became of those before."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = sorted(asks, key=lambda ask: ask.at_s)
        self._num_taken = 0

    @property
    def due_s(self) -> float:
        return self._asks[self._num_taken].at_s if self._num_taken < len(self._asks) else NEVER

    def take(self) -> Ask:
        self._num_taken += 1
        return self._asks[self._num_taken - 1]

    def finished(self, now_s: float) -> None:
        pass


class Closed:
    """So many clients, each of which asks again as soon as it is answered, until `num_requests` were asked."""

    def __init__(self, concurrency: int, num_requests: int, num_input: int, num_output: int) -> None:
        self._waiting = [0.0] * min(concurrency, num_requests)
        self._left = num_requests - len(self._waiting)
        self._input, self._output = num_input, num_output

    @property
    def due_s(self) -> float:
        return self._waiting[0] if self._waiting else NEVER

    def take(self) -> Ask:
        return Ask(self._waiting.pop(0), self._input, self._output)

    def finished(self, now_s: float) -> None:
        if self._left:
            self._left -= 1
            self._waiting.append(now_s)


def random_times(num_requests: int, rate: float, shape: float, seed: int) -> list[float]:
    """Times of arrivals at `rate` a second, their gaps gamma-distributed: shape 1 is Poisson, less comes in bursts."""
    gaps = np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), num_requests)
    times: list[float] = gaps.cumsum().tolist()
    return times


class _Line(msgspec.Struct, forbid_unknown_fields=False):
    arrival_s: float | None = None
    timestamp: float | None = None
    input: int | None = None
    input_length: int | None = None
    output: int | None = None
    output_length: int | None = None


def read_asks(path: Path, num_input: int, num_output: int) -> list[Ask]:
    """Requests of a file, a JSON object a line: `arrival_s`, and `input` and `output` where they differ from the rest.

    The names that published traces use are understood too: `timestamp` (in milliseconds), `input_length`,
    `output_length`. Raises UserError naming the file and the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"--arrivals {path}: cannot be read: {error.strerror or error}") from None
    decode = msgspec.json.Decoder(_Line).decode
    asks = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            asks.append(_ask(decode(text), num_input, num_output))
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise UserError(f"--arrivals {path}: line {number}: {error}") from None
    if not asks:
        raise UserError(f"--arrivals {path}: holds no requests")
    first = min(ask.at_s for ask in asks)
    return [Ask(ask.at_s - first, ask.input, ask.output) for ask in asks]


def _ask(line: _Line, num_input: int, num_output: int) -> Ask:
    if line.arrival_s is None and line.timestamp is None:
        raise ValueError("arrival_s is missing")
    at_s = line.arrival_s if line.arrival_s is not None else (line.timestamp or 0.0) / 1000
    inputs = next((n for n in (line.input, line.input_length) if n is not None), num_input)
    outputs = next((n for n in (line.output, line.output_length) if n is not None), num_output)
    if not math.isfinite(at_s):
        raise ValueError("arrival_s is no time")
    if inputs < 1 or outputs < 1:
        raise ValueError("input and output must be at least 1")
    return Ask(at_s, inputs, outputs)
