"""`python -m bench.kernel_cells NAME...`: measures the cells of bench/kernel_cells/NAME.py on the GPU at hand.

Every cell's line is printed as it comes (not with `--quiet`) and appended to a JSON file; at the end stands, for each
kernel and shape, the best variant beside the shipped one, which is the variant without a name.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.gpu_timing import Ceilings, Timing, machine, measure_ceilings, one_line, time_calls
from bench.kernel_cells import Cell

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "gpu-kernels.jsonl"
TOLERANCE = 1e-2
"""Relative error above which a cell's check fails; a cell's tag `tolerance` replaces it."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 where a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernel_cells", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="modules of bench/kernel_cells; `all` is every one")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="JSON lines (%(default)s)")
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cells whose line holds all these words")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="start no cell after this")
    parser.add_argument("--quiet", action="store_true", help="print the summary and what failed, no line a cell")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    return measure_all(
        _names(options.names),
        options.out,
        words=options.filter.split(),
        budget_s=options.budget,
        quiet=options.quiet,
    )


def _names(given: Sequence[str]) -> list[str]:
    if list(given) != ["all"]:
        return list(given)
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("__"))


def measure_all(names: Sequence[str], out: Path, *, words: Sequence[str], budget_s: float, quiet: bool) -> int:
    """Measure, print and append; the exit code."""
    started = time.monotonic()
    ceilings = measure_ceilings(torch.device("cuda", torch.cuda.current_device()))
    head = machine().record() | {
        "copy_bytes_per_s": round(ceilings.bytes_per_s), "bf16_flops_per_s": round(ceilings.flops_per_s)
    }  # fmt: skip
    print(
        f"{head['gpu']}, torch {head['torch']}: copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings.flops_per_s / 1e12:.0f} TFLOPS",
        flush=True,
    )
    rows: list[Row] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        for name in names:
            for cell in _cells(name, rows):
                if words and not all(word in label(cell) for word in words):
                    continue
                if time.monotonic() - started > budget_s:
                    print(f"--budget: stopped before {label(cell)}")
                    print(summary(rows))
                    return 1
                row = measure(cell, ceilings, time_calls)
                rows.append(row)
                file.write(json.dumps(head | {"module": name} | row) + "\n")
                file.flush()
                if not quiet or row["problem"]:
                    print(line(row), flush=True)
                del cell  # its inputs go before the next one's come
    print(summary(rows))
    return 1 if any(row["problem"] for row in rows) else 0


def _cells(name: str, rows: list[Row]) -> Iterator[Cell]:
    """A module's cells; what it raises becomes a failed row and ends that module, not the others."""
    try:
        cells: Iterator[Cell] = importlib.import_module(f"bench.kernel_cells.{name}").cells()
        while True:
            cell = next(cells, None)
            if cell is None:
                return
            yield cell
            del cell
            gc.collect()
            torch.cuda.empty_cache()
    except Exception as error:
        rows.append(_row(name, {}, "", problem=f"cells(): {one_line(error)}"))
        print(line(rows[-1]), flush=True)


def _row(kernel: str, shape: dict[str, int | str], variant: str, **values: Any) -> Row:
    empty: Row = {"us": None, "spread": None, "floor_us": None, "of_floor": None, "error": None, "problem": ""}
    return {"kernel": kernel, "shape": shape, "variant": variant} | empty | {"graph": True, "note": ""} | values


def measure(cell: Cell, ceilings: Ceilings, timer: Callable[[Sequence[Callable[[], object]]], Timing]) -> Row:
    """Check, then time; what goes wrong is in the row's `problem`, and a failed check is timed all the same."""
    row = _row(cell.kernel, dict(cell.shape), cell.variant)
    row["bytes"], row["flops"], row["tags"] = cell.bytes, cell.flops, cell.tags
    if cell.check is not None:
        try:
            row["error"] = error = float(cell.check())
            if not error <= float(cell.tags.get("tolerance", TOLERANCE)):  # a NaN is a failure too
                row["problem"] = f"FAIL error {error:.2e}"
        except Exception as problem:
            row["problem"] = f"FAIL check: {one_line(problem)}"
    try:
        timing = timer(cell.calls)
    except Exception as problem:
        row["problem"] = f"{row['problem']} FAIL: {one_line(problem)}".strip()
        return row
    floor_us = ceilings.floor_s(cell.bytes, cell.flops) * 1e6
    row |= {"us": timing.us, "spread": timing.spread, "graph": timing.graph, "note": timing.note}
    row |= {"floor_us": floor_us, "of_floor": floor_us / timing.us}
    return row


def label(cell: Cell) -> str:
    """What `--filter` is compared with."""
    return f"{cell.kernel} {_shape(cell.shape)} {cell.variant}"


def _shape(shape: dict[str, int | str]) -> str:
    return " ".join(f"{key}={value}" for key, value in shape.items())


def line(row: Row) -> str:
    """One cell, compact."""
    text = f"{row['kernel']} {_shape(row['shape'])} [{row['variant']}]"
    if row["us"] is not None:
        text += f" {row['us']:.1f}us"
        text += f" {row['of_floor']:.0%}" if row["floor_us"] else ""
        text += f" ±{row['spread']:.0%}" if row["spread"] > 0.05 else ""
    text += f" err {row['error']:.1e}" if row["error"] is not None else ""
    text += "" if row["graph"] else f" (no graph: {row['note']})"
    return f"{text} {row['problem']}".rstrip()


def summary(rows: Sequence[Row]) -> str:
    """By kernel and shape: the best variant that is right, its share of the floor, and the shipped one's time."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["shape"] or row["us"] is not None:
            groups.setdefault((row["kernel"], _shape(row["shape"])), []).append(row)
    lines = []
    for (kernel, shape), many in groups.items():
        right = [row for row in many if row["us"] is not None and not row["problem"]]
        if not right:
            lines.append(f"{kernel} {shape}: none of {len(many)} is right")
            continue
        best = min(right, key=lambda row: float(row["us"]))
        text = f"{kernel} {shape}: {best['us']:.1f}us"
        text += f" {best['of_floor']:.0%}" if best["floor_us"] else ""
        shipped = next((row for row in right if not row["variant"]), None)
        if best["variant"]:
            text += f" [{best['variant']}]"
            text += f" shipped {shipped['us']:.1f}us" if shipped else ""
        lines.append(text)
    failed = sum(bool(row["problem"]) for row in rows)
    return "\n".join([f"--- best of {len(rows)} cells, {failed} failed", *lines])


if __name__ == "__main__":
    sys.exit(main())
