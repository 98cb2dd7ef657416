"""What a trace must be to open: the rules of the Trace Event Format for the kinds of events that headrace writes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]

METADATA = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}

HALF_NS = 5e-4
"""Times are microseconds in fractions of which no sum is exact."""


def read(path: Path) -> list[Event]:
    """All events of a file that keeps the rules."""
    document = json.loads(path.read_text())
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    for event in events:
        _check(event)
    _check_tracks(events)
    _check_flows(events)
    return events


def slices(events: list[Event], category: str | None = None) -> list[Event]:
    """The complete events, in the order of their begin."""
    found = [event for event in events if event["ph"] == "X" and category in (None, event["cat"])]
    return sorted(found, key=lambda event: event["ts"])


def track_names(events: list[Event]) -> dict[int, str]:
    """The names that metadata gives to tracks."""
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def _check(event: Event) -> None:
    assert event["ph"] in "XMsf", event
    assert isinstance(event["name"], str) and event["name"]
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    # Microseconds, with a fraction for what is finer.
    assert isinstance(event["ts"], int | float) and event["ts"] >= 0
    if event["ph"] == "M":
        key = METADATA[event["name"]]
        assert event["args"].keys() == {key}
        assert isinstance(event["args"][key], int if key == "sort_index" else str)
        return
    assert isinstance(event["cat"], str) and event["cat"]
    if event["ph"] == "X":
        assert isinstance(event["dur"], int | float) and event["dur"] >= 0
        assert isinstance(event.get("args", {}), dict)
    else:
        assert isinstance(event["id"], int | str)
        assert event.get("bp") == ("e" if event["ph"] == "f" else None)


def _check_tracks(events: list[Event]) -> None:
    names = track_names(events)
    assert len({event["pid"] for event in events}) == 1
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["headrace"]
    for track in {event["tid"] for event in events if event["ph"] != "M"}:
        assert track in names and track != 0
        of_track = [event for event in slices(events) if event["tid"] == track]
        # Slices of one thread must be nested or apart: ours are apart.
        assert all(a["ts"] + a["dur"] <= b["ts"] + HALF_NS for a, b in pairwise(of_track))


def _check_flows(events: list[Event]) -> None:
    """Each arrow has one begin and one end, no earlier, each within a slice of its track."""
    ends: dict[Any, list[Event]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(event)
    spans: dict[int, list[Event]] = {}
    for event in slices(events):
        spans.setdefault(event["tid"], []).append(event)
    for begin, end in ends.values():
        assert (begin["ph"], end["ph"]) == ("s", "f")
        assert begin["ts"] <= end["ts"]
        for one in (begin, end):
            assert any(s["ts"] - HALF_NS <= one["ts"] <= s["ts"] + s["dur"] + HALF_NS for s in spans[one["tid"]])
