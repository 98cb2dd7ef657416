"""Markdown tables of what was measured on GPUs: the engine beside its floors and vLLM, kernels beside theirs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

VLLM = {1: 329, 2: 715, 8: 1599, 32: 2802, 64: 3816, 128: 6216, 256: 10518}
"""vLLM 0.25.0, PP2 on 2 x H200, the k2-slice model, prompt 128, uniform routing: decoded tokens a second."""
VLLM_MODEL, VLLM_PROMPT, VLLM_GPU = "k2-slice", 128, "NVIDIA H200"
REQUIRED = ((64, 1.3), (128, 1.15), (256, 1.1))
"""Up to so many requests, so many times vLLM's rate."""


def vllm_rate(row: Row) -> float | None:
    """vLLM's rate for the same cell, where it was measured."""
    same = row.get("model") == VLLM_MODEL and row.get("prompt") == VLLM_PROMPT and row.get("kind") == "decode"
    return VLLM.get(row["requests"]) if same and row.get("gpu") == VLLM_GPU and row.get("p2p") else None


def required_ratio(requests: int) -> float:
    """Of vLLM's rate."""
    return next((ratio for most, ratio in REQUIRED if requests <= most), REQUIRED[-1][1])


def read_rows(path: Path) -> list[Row]:
    """A JSON-lines file; nothing where there is none."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()]


def append_row(path: Path, row: Row) -> None:
    """Add a record to a JSON-lines file."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def tables(engine: Iterable[Row], kernels: Iterable[Row]) -> str:
    """All of them; of several records of one cell the last one counts."""
    latest = {row["key"]: row for row in engine if row.get("key")}
    parts = [
        decode_table([row for row in latest.values() if row["kind"] == "decode"]),
        prefill_table([row for row in latest.values() if row["kind"] == "prefill"]),
        kernel_table(kernels),
    ]
    return "\n\n".join(part for part in parts if part)


def _name(row: Row) -> str:
    extra = " ".join(f"{key}={value}" for key, value in row["options"].items() if key not in PLAIN_OPTIONS)
    name = f"{row['layout']} {'/'.join(map(str, row['split']))}" + ("" if row["p2p"] else ", no P2P")
    return " ".join(filter(None, (name, extra, row.get("note", ""))))


PLAIN_OPTIONS = ("weights", "routing", "max_len", "seed")
"""Said of all rows in the text around the table."""


def decode_table(rows: Sequence[Row]) -> str:
    """A row for every model, layout and split; a column for every count of requests."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        counts = sorted({row["requests"] for row in mine})
        parts.append(table([f"{model}, decode tok/s", *map(str, counts)], list(_decode_rows(mine, counts))))
    return "\n\n".join(parts)


def _decode_rows(rows: Sequence[Row], counts: Sequence[int]) -> Iterable[list[str]]:
    others = {row["requests"]: rate for row in rows if (rate := vllm_rate(row)) is not None}
    if others:
        yield ["vLLM pp2", *(f"{others[count]:.0f}" if count in others else "" for count in counts)]
        yield ["required ratio", *(f"{required_ratio(count)}" if count in others else "" for count in counts)]
    for name in dict.fromkeys(map(_name, rows)):
        by_count = {row["requests"]: row for row in rows if _name(row) == name}
        yield [name, *(_cell(by_count.get(count), "rate") for count in counts)]
        if others:
            yield [f"{name}: of vLLM", *(_ratio(by_count.get(count)) for count in counts)]
        yield [f"{name}: of its floor", *(_share(by_count.get(count), "floor") for count in counts)]
        yield [f"{name}: of the best split's floor", *(_share(by_count.get(count), "best_floor") for count in counts)]
        busy = [min((s for s in row["busy"] if s is not None), default=None) for row in by_count.values()]
        shown = {row["requests"]: share for row, share in zip(by_count.values(), busy, strict=True)}
        yield [f"{name}: least busy stage", *("" if (s := shown.get(c)) is None else f"{s:.0%}" for c in counts)]


def _cell(row: Row | None, field: str) -> str:
    return "" if row is None else f"{row[field]:.0f}"


def _share(row: Row | None, floor: str) -> str:
    return "" if row is None else f"{row['rate'] / row[floor]:.0%}"


def _ratio(row: Row | None) -> str:
    other = None if row is None else vllm_rate(row)
    if row is None or other is None:
        return ""
    ratio = row["rate"] / other
    return f"{ratio:.2f}" if ratio >= required_ratio(row["requests"]) else f"**{ratio:.2f}**"


def prefill_table(rows: Sequence[Row]) -> str:
    """One line a layout."""
    lines = [
        [
            f"{row['model']} {_name(row)}",
            str(row["prompt"]),
            f"{row['rate']:.0f}",
            f"{row['tflops']:.0f}",
            f"{row['of_product_rate']:.0%}",
        ]
        for row in rows
    ]
    return table(["prefill", "prompt", "tok/s", "TFLOPS", "of the product rate"], lines)


def kernel_table(rows: Iterable[Row]) -> str:
    """The shipped variant of every kernel and shape (the fastest right one where none is shipped), latest record."""
    latest: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        if row["us"] is not None and not row["problem"]:
            shape = " ".join(f"{key}={value}" for key, value in row["shape"].items())
            latest[row["kernel"], shape, row["variant"]] = row
    groups: dict[tuple[str, str], list[Row]] = {}
    for (kernel, shape, _), row in latest.items():
        groups.setdefault((kernel, shape), []).append(row)
    lines = []
    for (kernel, shape), many in groups.items():
        best = min(many, key=lambda row: float(row["us"]))
        row = next((row for row in many if not row["variant"]), best)
        share = f"{row['of_floor']:.0%}" if row["floor_us"] else ""
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        lines.append([kernel, shape, row["variant"], f"{row['us']:.1f}", f"{row['floor_us']:.1f}", share, error])
    return table(["kernel", "shape", "variant", "µs", "floor µs", "of floor", "error"], lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown, the first `left` columns to the left; short lines end in empty cells. Nothing without lines."""
    if not lines:
        return ""
    rule = ["---" if i < left else "--:" for i in range(len(head))]
    full = [[*line, *[""] * (len(head) - len(line))] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *full])
