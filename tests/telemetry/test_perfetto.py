"""Traces in the Trace Event Format, whatever the spans are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.telemetry import perfetto
from headrace.telemetry.perfetto import Span, write_trace
from tests.telemetry.trace_format import read, slices, track_names


def test_a_span_is_a_slice_of_its_stages_track(tmp_path: Path) -> None:
    spans = [
        Span(0, "decode 7", 0.25, 0.5, {"plan": 7, "rows": 3, "share": 0.5, "what": "x"}),
        Span(1, "waiting for activations", 0.5, 0.25, category="wait"),
        Span(1, "decode 7", 0.75, 1e-6),
    ]
    write_trace(tmp_path / "t.json", spans)
    events = read(tmp_path / "t.json")
    first, wait, second = slices(events)
    assert track_names(events) == {first["tid"]: "stage 0", second["tid"]: "stage 1"}
    assert wait["tid"] == second["tid"]
    assert (first["ts"], first["dur"], second["ts"], second["dur"]) == (250_000, 500_000, 750_000, 1)
    assert first["args"] == {"plan": 7, "rows": 3, "share": 0.5, "what": "x"}
    assert [event["cat"] for event in (first, wait, second)] == ["step", "wait", "step"]


def test_ranks_of_a_stage_have_tracks_of_their_own(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [Span(r // 2, "x", r, 1, rank=r) for r in range(4)])
    assert list(track_names(read(tmp_path / "t.json")).values()) == [
        "stage 0 (rank 0)", "stage 0 (rank 1)", "stage 1 (rank 2)", "stage 1 (rank 3)",
    ]  # fmt: skip


def test_arrows_lead_a_flow_from_each_stage_to_the_next(tmp_path: Path) -> None:
    spans = [Span(s, f"p{f}", f + s, 1, rank=2 * s + r, flow=f) for f in range(3) for s in range(3) for r in (0, 1)]
    write_trace(tmp_path / "t.json", spans)
    arrows = [event for event in read(tmp_path / "t.json") if event["ph"] in "sf"]
    tracks = sorted((begin["tid"], end["tid"]) for begin, end in zip(arrows[::2], arrows[1::2], strict=True))
    # From the rank that came first to the rank that came first, and none between ranks of a stage.
    first, second, third = (perfetto.FIRST_TRACK + rank for rank in (0, 2, 4))
    assert tracks == sorted([(first, second), (second, third)] * 3)


def test_flows_that_never_end_are_forgotten(tmp_path: Path) -> None:
    last = perfetto.MOST_FLOWS
    spans = [Span(0, "x", f, 1, flow=f) for f in range(last + 1)]
    write_trace(tmp_path / "t.json", [*spans, Span(1, "x", 1e6, 1, flow=0), Span(1, "x", 1e6 + 1, 1, flow=last)])
    (begin,) = [event for event in read(tmp_path / "t.json") if event["ph"] == "s"]
    assert last * 1e6 < begin["ts"] <= (last + 1) * 1e6


def test_no_spans_are_a_trace_too(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", [])
    assert [event["ph"] for event in read(tmp_path / "t.json")] == ["M"]


times = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=20)


@given(gaps=times, origin=st.floats(0, 1e6))
def test_spans_that_touch_stay_apart_and_keep_their_times(
    tmp_path_factory: object, gaps: list[tuple[float, float]], origin: float
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.json"  # type: ignore[attr-defined]  # pytest's
    spans, now = [], origin
    for i, (gap, dur) in enumerate(gaps):
        spans.append(Span(0, str(i), now + gap, dur, flow=i))
        now = now + gap + dur
    write_trace(path, spans)
    for span, event in zip(spans, slices(read(path)), strict=True):
        assert abs(event["ts"] - span.start_s * 1e6) < 0.01 and abs(event["dur"] - span.dur_s * 1e6) < 0.01
