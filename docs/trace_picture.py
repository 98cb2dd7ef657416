"""Draws a part of a trace as SVG: `python docs/trace_picture.py TRACE.json FROM_MS TO_MS OUT.svg`. A row a stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path

WIDTH, LEFT, ROW, BAR, TOP = 900, 70, 24, 18, 26
DECODES, PROMPTS, INK, PAPER = "#4c78a8", "#f58518", "#333333", "#ffffff"


def main() -> None:
    """Read, draw, write."""
    source, begin_ms, end_ms, target = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    events = json.loads(Path(source).read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    stages = 1 + max(event["tid"] for event in slices)
    height = TOP + stages * ROW + 30
    scale = (WIDTH - LEFT - 10) / (end_ms - begin_ms)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        legend(LEFT, DECODES, "decode rows alone"),
        legend(LEFT + 170, PROMPTS, "with prompt tokens"),
    ]
    for stage in range(stages):
        y = TOP + stage * ROW
        parts.append(f'<text x="8" y="{y + 13}" font-size="12" fill="{INK}">stage {stage}</text>')
    for event in slices:
        first, last = event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000
        if last <= begin_ms or first >= end_ms:
            continue
        x0, x1 = (LEFT + (min(max(t, begin_ms), end_ms) - begin_ms) * scale for t in (first, last))
        y = TOP + event["tid"] * ROW
        colour = PROMPTS if event["args"]["rows"] > event["args"]["decodes"] else DECODES
        parts.append(
            f'<rect x="{x0:.1f}" y="{y}" width="{max(0.4, x1 - x0 - 0.6):.1f}" height="{BAR}" fill="{colour}"/>'
        )
        label = str(event["args"]["tokens"])
        if x1 - x0 > 7 * len(label) + 5:
            parts.append(f'<text x="{x0 + 3:.1f}" y="{y + 13}" font-size="10" fill="{PAPER}">{label}</text>')
    for i in range(5):
        time_ms = begin_ms + i * (end_ms - begin_ms) / 4
        x = LEFT + (time_ms - begin_ms) * scale
        anchor = "end" if i == 4 else "start"
        parts.append(
            f'<text x="{x:.0f}" y="{height - 10}" font-size="11" fill="{INK}" text-anchor="{anchor}">'
            f"{time_ms:.0f} ms</text>"
        )
    Path(target).write_text("\n".join([*parts, "</svg>", ""]))


def legend(x: int, colour: str, text: str) -> str:
    """A square and what it means."""
    return (
        f'<rect x="{x}" y="6" width="12" height="12" fill="{colour}"/>'
        f'<text x="{x + 17}" y="16" font-size="12" fill="{INK}">{text}</text>'
    )


if __name__ == "__main__":
    main()
