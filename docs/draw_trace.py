"""Draws a part of a trace as SVG: `python docs/draw_trace.py TRACE.json OUT.svg FROM_MS TO_MS`.

A track a stage; a slice a microbatch, with its plan's number; waits in grey; arrows where a plan goes on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, TOP, ROW, HEIGHT = 960, 96, 40, 64, 34
COLOURS = {"prompt": "#c65b3c", "mixed": "#c79a2e", "decode": "#3f7cac", "waiting": "#e3e3e3"}
LEGEND = {"prompt": "prompt", "mixed": "prompt and decode rows", "decode": "decode rows", "waiting": "waiting"}
CHAR = 6.5
"""Width of a character."""


def main() -> int:
    """Returns the exit code."""
    trace, out, begin, end = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    events = json.loads(trace.read_text())["traceEvents"]
    out.write_text("\n".join(draw(events, 1000 * begin, 1000 * end)) + "\n")
    return 0


def draw(events: list[dict[str, Any]], begin: float, end: float) -> list[str]:
    """The lines of a picture of what happened between two times, in microseconds."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = {tid: TOP + ROW * i for i, tid in enumerate(sorted(names))}

    def x(time: float) -> float:
        return round(LEFT + (WIDTH - LEFT - 8) * (min(max(time, begin), end) - begin) / (end - begin), 1)

    shown = [
        event for event in events if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin
    ]
    height = TOP + ROW * len(rows) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<defs><marker id="a" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
        '<path d="M0 0L6 3L0 6z" fill="#444"/></marker></defs>',
        *legend(),
    ]
    lines += [f'<text x="4" y="{y + HEIGHT / 2 + 4}">{escape(names[tid])}</text>' for tid, y in rows.items()]
    for event in shown:
        left, right = x(event["ts"]), x(event["ts"] + event["dur"])
        lines.append(slice_of(event, left, right, rows[event["tid"]]))
    lines += arrows(events, begin, end, x, rows)
    step = tick(end - begin)
    for i in range(int(begin // step) + 1, int(end // step) + 1):
        at = x(i * step)
        lines.append(f'<path d="M{at} {height - 22}v4" stroke="#444"/>')
        lines.append(f'<text x="{at}" y="{height - 6}" text-anchor="middle">{i * step / 1000:g} ms</text>')
    return [*lines, "</svg>"]


def slice_of(event: dict[str, Any], left: float, right: float, top: float) -> str:
    """A rectangle, with the plan's number where it fits."""
    kind, _, number = event["name"].partition(" ")
    width = round(max(0.6, right - left), 1)
    place = f'x="{left}" y="{top}" width="{width}" height="{HEIGHT}"'
    box = f'<rect {place} fill="{COLOURS[kind]}" stroke="white" stroke-width=".4"/>'
    if kind == "waiting" or CHAR * len(number) > width:
        return box
    middle = round((left + right) / 2, 1)
    return f'{box}<text x="{middle}" y="{top + HEIGHT / 2 + 4}" fill="white" text-anchor="middle">{number}</text>'


def arrows(events: list[dict[str, Any]], begin: float, end: float, x: Any, rows: dict[int, int]) -> list[str]:
    """From each slice to the same plan's in the next stage."""
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    lines = []
    for start in (event for event in events if event["ph"] == "s" and begin < event["ts"]):
        stop = ends[start["id"]]
        if stop["ts"] < end:
            there, here = rows[stop["tid"]], rows[start["tid"]] + HEIGHT
            lines.append(
                f'<path d="M{x(start["ts"])} {here}L{x(stop["ts"])} {there}" stroke="#444" fill="none" '
                'marker-end="url(#a)"/>'
            )
    return lines


def legend() -> list[str]:
    """What the colours mean."""
    lines, at = [], float(LEFT)
    for kind, text in LEGEND.items():
        lines.append(f'<rect x="{at}" y="10" width="12" height="12" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{at + 18}" y="20">{text}</text>')
        at += 40 + CHAR * len(text)
    return lines


def tick(span: float) -> float:
    """A round distance of marks, of which some ten are shown; microseconds."""
    step = 1000.0
    while span / step > 12:
        step *= 2 if span / step <= 24 else 5 if span / step <= 60 else 10
    return step


if __name__ == "__main__":
    sys.exit(main())
