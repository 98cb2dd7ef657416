"""Traces that Perfetto and Chrome open: the JSON of the Trace Event Format, written span by span.

The format is that of "Trace Event Format" by the Catapult project (Google): complete events (X), metadata (M) and flow
events (s, f), with times in microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

PID, FIRST_TRACK = 1, 2
"""Viewers take thread 0 for an idle processor, and one with its process's number for the main thread."""
MOST_FLOWS = 4096
"""Flows that are followed at once; those that have gone through all stages are forgotten so, at the latest."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a stage's time. Spans of one stage and rank must not overlap."""

    stage: int
    name: str
    """Viewers choose the colour by it."""
    start_s: float
    """From any origin that is the same for all."""
    dur_s: float
    args: Mapping[str, int | float | str] = field(default_factory=dict)
    """Shown when the span is selected."""
    category: str = "step"
    rank: int | None = None
    """Each rank has a track of its own; None where a stage is one thing."""
    flow: int | None = None
    """Spans of one flow are joined by arrows from each stage to the next."""


def write_trace(path: Path, spans: Iterable[Span], title: str = "headrace") -> None:
    """Write spans to `path` as they come, those of a flow in the order of its stages. Raises OSError."""
    with path.open("wb") as file:
        writer = _Writer(file)
        writer.begin(title)
        for span in spans:
            writer.add(span)
        writer.end()


class _Writer:
    """One event a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode
        self._tracks: set[int] = set()
        self._flows: OrderedDict[int, Span] = OrderedDict()
        """The latest stage's span of each flow."""
        self._num_arrows = 0

    def begin(self, title: str) -> None:
        self._file.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
        self._file.write(self._encode(_metadata("process_name", FIRST_TRACK, name=title)))

    def end(self) -> None:
        self._file.write(b"\n]}\n")

    def add(self, span: Span) -> None:
        track = _track(span)
        if track not in self._tracks:
            self._tracks.add(track)
            name = f"stage {span.stage}" + ("" if span.rank is None else f" (rank {span.rank})")
            self._write(_metadata("thread_name", track, name=name))
            self._write(_metadata("thread_sort_index", track, sort_index=track))
        start, end = _ns(span.start_s), _ns(span.start_s + span.dur_s)
        event = {"ph": "X", "name": span.name, "cat": span.category, "pid": PID, "tid": track}
        event |= {"ts": start / 1000, "dur": (end - start) / 1000}
        if span.args:
            event["args"] = span.args
        self._write(event)
        if span.flow is not None:
            self._follow(span.flow, span)

    def _follow(self, flow: int, span: Span) -> None:
        earlier = self._flows.get(flow)
        if earlier is not None and span.stage <= earlier.stage:
            return  # another rank of the same stage
        if earlier is not None and span.stage == earlier.stage + 1:
            self._arrow(earlier, span)
        self._flows[flow] = span
        if len(self._flows) > MOST_FLOWS:
            self._flows.popitem(last=False)

    def _arrow(self, source: Span, target: Span) -> None:
        # An arrow belongs to the slice that is there at its time: the last moment of one, the first of the other.
        arrives, begins = _ns(target.start_s), _ns(source.start_s)
        leaves = max(begins, min(_ns(source.start_s + source.dur_s) - 1, arrives))
        event = {"name": "activations", "cat": "flow", "id": self._num_arrows, "pid": PID}
        self._num_arrows += 1
        self._write({"ph": "s", "tid": _track(source), "ts": leaves / 1000} | event)
        self._write({"ph": "f", "bp": "e", "tid": _track(target), "ts": max(leaves, arrives) / 1000} | event)

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(b",\n" + self._encode(event))


def _metadata(kind: str, track: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PID, "tid": track, "ts": 0, "args": args}


def _track(span: Span) -> int:
    return FIRST_TRACK + (span.stage if span.rank is None else span.rank)


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that what touches does not come to overlap."""
    return round(seconds * 1e9)
