"""A picture of a plan: throughput by concurrency, the best layout of each number of stages; memory of the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.plan.hardware import GIB
from headrace.plan.pace import decode_pace, decode_sizes
from headrace.plan.reads import decode_balance
from headrace.plan.report import Report, machine_text
from headrace.plan.search import Layout

BEST = 6
"""Layouts that are drawn at most."""
SHADES = {
    "weights": "#4c78a8",
    "steps": "#f58518",
    "left alone": "#bab0ac",
    "KV cache": "#54a24b",
}


def check_plot(path: Path) -> None:
    """Raise UserError, before anything is computed, where no picture can be drawn or written there."""
    if path.suffix not in (".png", ".svg"):
        raise UserError(f"--plot {path}: name a .png or .svg file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path}: its folder is not there")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(f"--plot {path}: needs matplotlib: pip install 'headrace[plot]'") from None


def draw(report: Report, path: Path) -> None:
    """Write the picture. Raises UserError where nothing fits or the file cannot be written."""
    from matplotlib.figure import Figure

    # The best of each number of stages: layouts that differ in little else lie on each other.
    found: dict[int, Layout] = {}
    for layout in report.layouts:
        if layout.fits:
            found.setdefault(layout.mesh.pp, layout)
    best = list(found.values())[:BEST]
    if not best:
        raise UserError(f"--plot {path}: no layout fits, there is nothing to draw")
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _throughput(left, report, best)
    _memory(right, best[0])
    figure.suptitle(f"{report.model} on {machine_text(report.machine)}", fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written: {error.strerror or error}") from None


def _throughput(axes: Any, report: Report, best: list[Layout]) -> None:
    demand = report.question.demand
    most = max(demand.concurrency)
    counts = sorted({*demand.concurrency, *(1 << power for power in range(most.bit_length()))})
    for layout in best:
        axes.plot(counts, [_rate(report, layout, count) for count in counts], marker="o", ms=3, label=layout.mesh.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel("requests under way")
    axes.set_ylabel("tokens generated a second")
    axes.set_title(f"decode, {demand.input} tokens in, {demand.output} out", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)


def _rate(report: Report, layout: Layout, count: int) -> float:
    if count in layout.decode:
        return layout.decode[count].tok_s
    question, mesh = report.question, layout.mesh
    held = layout.kv_tokens // (question.demand.input + question.demand.output)
    running = max(1, min(count, question.limits.max_running, held))
    cost = question.cost(mesh, layout.machine)
    sizes = decode_sizes(running, mesh.pp, decode_balance(question.spec, mesh))
    return running / decode_pace(cost, sizes, question.length, question.limits.run_ahead).period_s


def _memory(axes: Any, layout: Layout) -> None:
    """Bars of what is in each GPU of a stage, up to its memory."""
    stages = range(len(layout.stages))
    parts = {
        "weights": [stage.weight_bytes for stage in layout.stages],
        "steps": [stage.steps_bytes for stage in layout.stages],
        "KV cache": [stage.kv_bytes for stage in layout.stages],
        "left alone": [stage.spare for stage in layout.stages],
    }
    below = [0.0] * len(layout.stages)
    for name, sizes in parts.items():
        heights = [size / GIB for size in sizes]
        axes.bar(stages, heights, bottom=below, label=name, color=SHADES[name], width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for stage in stages:
        axes.text(
            stage,
            layout.stages[stage].weight_bytes / GIB / 2,
            f"{layout.mesh.split[stage]}",
            ha="center",
            color="white",
        )
    axes.set_xticks(list(stages))
    axes.set_xlim(-0.6, max(len(layout.stages), 4) - 0.4)
    axes.set_ylim(0, max(below) * 1.22)
    axes.set_xlabel("stage (with its number of layers)")
    axes.set_ylabel("GiB on each GPU")
    axes.set_title(f"memory, {layout.mesh.name}", fontsize=10)
    axes.legend(fontsize=9, ncols=4, loc="upper center")
