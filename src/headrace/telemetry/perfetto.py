"""Traces in Chrome's JSON format, which Perfetto opens: one track a stage, one slice a microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from headrace.errors import UserError


class Span(msgspec.Struct, frozen=True, gc=False):
    """Something a stage did for a while."""

    stage: int
    name: str
    start_s: float
    dur_s: float
    args: Mapping[str, int | float | str] = {}
    """Shown beside the slice."""


def write_trace(path: Path, spans: Iterable[Span], title: str = "headrace") -> None:
    """Write spans, in any order, as one file. Raises UserError naming --trace if it cannot be written.

    The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, complete events (X) in
    microseconds and metadata (M) that names and orders the tracks.
    """
    stages: set[int] = set()
    encode = msgspec.json.Encoder().encode
    try:
        with path.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            for span in spans:
                stages.add(span.stage)
                file.write(encode(_slice(span)) + b",\n")
            names = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
            for stage in sorted(stages):
                track = {"ph": "M", "pid": 0, "tid": stage}
                names.append({**track, "name": "thread_name", "args": {"name": f"stage {stage}"}})
                names.append({**track, "name": "thread_sort_index", "args": {"sort_index": stage}})
            file.write(b",\n".join(map(encode, names)) + b"\n]}\n")
    except OSError as error:
        raise UserError(f"--trace {path}: cannot be written: {error.strerror or error}") from None


def _slice(span: Span) -> dict[str, object]:
    # In whole nanoseconds, inwards: slices that follow each other must not overlap by a rounding, or they are nested.
    begin_ns = math.ceil(span.start_s * 1e9)
    end_ns = max(begin_ns, math.floor((span.start_s + span.dur_s) * 1e9))
    return {
        "ph": "X",
        "pid": 0,
        "tid": span.stage,
        "name": span.name,
        "ts": begin_ns / 1000,
        "dur": (end_ns - begin_ns) / 1000,
        "args": span.args,
    }
