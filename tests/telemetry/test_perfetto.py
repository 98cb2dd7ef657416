from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.telemetry.perfetto import Span, write_trace


def test_stages_are_named_tracks_and_spans_their_slices(tmp_path: Path) -> None:
    spans = [Span(1, "4 rows", 0.5, 0.25, {"tokens": 4}), Span(0, "4 rows", 0.0, 0.5)]
    write_trace(tmp_path / "trace.json", spans, "a title")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert slices == [
        {"ph": "X", "pid": 0, "tid": 1, "name": "4 rows", "ts": 500_000, "dur": 250_000, "args": {"tokens": 4}},
        {"ph": "X", "pid": 0, "tid": 0, "name": "4 rows", "ts": 0, "dur": 500_000, "args": {}},
    ]
    named = {(event["name"], event.get("tid")): event["args"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert named == {
        ("process_name", None): {"name": "a title"},
        ("thread_name", 0): {"name": "stage 0"},
        ("thread_sort_index", 0): {"sort_index": 0},
        ("thread_name", 1): {"name": "stage 1"},
        ("thread_sort_index", 1): {"sort_index": 1},
    }


@given(st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=50))
def test_slices_that_follow_each_other_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, steps: list[float]
) -> None:
    ends = list(itertools.accumulate(steps, initial=0.0))
    file = tmp_path_factory.getbasetemp() / "followers.json"
    write_trace(file, [Span(0, "", begin, step) for begin, step in zip(ends, steps, strict=False)])
    slices = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    for one, other in itertools.pairwise(slices):
        assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * other["ts"])


def test_a_trace_without_spans_is_one(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", [])
    assert [event["ph"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]] == ["M"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--trace .*: cannot be written: Is a directory"):
        write_trace(tmp_path, [])
