"""What was found, for people as a table and for programs as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.plan.hardware import GIB, Machine
from headrace.plan.memory import StageMemory
from headrace.plan.search import Layout, Question

MOST_SHOWN = 16
"""Stages that are shown one by one."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A question, what it was asked of, and the answer."""

    model: str
    model_bytes: float
    """Of the language model's weights as stored."""
    question: Question
    machine: Machine
    layouts: Sequence[Layout]
    notes: Sequence[str] = ()
    """What else should be known, a line each."""


def to_json(report: Report) -> str:
    """One object; layouts best first."""
    machine, demand = report.machine, report.question.demand
    found = {
        "model": {
            "name": report.model, "bytes": round(report.model_bytes), "layers": report.question.spec.num_layers,
        },
        "machine": {
            "gpus": [gpu.slug for gpu in machine.gpus],
            "links": machine.link.slug if machine.link else "none",
            "hosts": machine.num_hosts,
            "network": machine.network.slug if machine.network else None,
        },
        "demand": {
            "concurrency": list(demand.concurrency), "input": demand.input, "output": demand.output,
            "max_len": report.question.longest, "objective": demand.objective, "routing": demand.routing,
        },
        "layouts": [_layout_json(layout) for layout in report.layouts],
        "notes": list(report.notes),
    }  # fmt: skip
    return msgspec.json.encode(found).decode()


def _layout_json(layout: Layout) -> Mapping[str, Any]:
    mesh = layout.mesh
    return {
        "name": mesh.name,
        "pp": mesh.pp,
        "tp": mesh.tp,
        "ep": mesh.ep,
        "split": list(mesh.split),
        "fits": layout.fits,
        "short_bytes": round(layout.short_bytes),
        "stages": [_stage_json(stage) for stage in layout.stages],
        "kv_tokens": layout.kv_tokens,
        "decode": {
            str(count): {
                "tok_s": round(one.tok_s, 2), "tpot_ms": round(1e3 * one.tpot_s, 3), "running": one.num_running,
                "microbatches": list(one.pace.sizes), "bubble": [round(float(idle), 4) for idle in one.pace.bubble],
            }
            for count, one in layout.decode.items()
        },
        "prefill_tok_s": round(layout.prefill_tok_s, 1),
        "ttft_ms": round(1e3 * layout.ttft_s, 2),
        "limited_by": layout.limited_by,
    }  # fmt: skip


def _stage_json(stage: StageMemory) -> Mapping[str, Any]:
    """`bytes` are the weights; `free_bytes` what they and the steps leave for the KV cache, negative if nothing."""
    return {
        "bytes": round(stage.weight_bytes),
        "free_bytes": round(stage.kv_bytes),
        "gpu_bytes": stage.gpu_bytes,
        "steps_bytes": round(stage.steps_bytes),
        "spare_bytes": round(stage.spare),
        "kv_token_bytes": stage.kv_token_bytes,
        "kv_tokens": stage.kv_tokens,
    }


def to_text(report: Report) -> str:
    """The ranked table."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    demand = report.question.demand
    yield f"{report.model}: {report.model_bytes / GIB:.1f} GiB of weights, {report.question.spec.num_layers} layers"
    yield machine_text(report.machine)
    yield (
        f"{demand.input} tokens in, {demand.output} out, {demand.routing} routing; "
        f"best first by {demand.objective}, split for {demand.target} requests"
    )
    fitting = [layout for layout in report.layouts if layout.fits]
    if fitting:
        yield ""
        head = ["layout", "GiB", "left", "KV tokens", "TTFT ms", "prefill/s"]
        head += [f"@{count}" for count in demand.concurrency]
        rows = [_row(layout, demand.concurrency) for layout in fitting]
        yield from _table(
            [*head, "limited by"], [[*row, layout.limited_by] for row, layout in zip(rows, fitting, strict=True)]
        )
        yield ""
        yield "GiB: weights of the fullest stage, each GPU; left: for the KV cache where that holds fewest tokens;"
        yield "@N: tokens/s of N requests, and ms a token"
        yield from _splits(fitting)
    out = [layout for layout in report.layouts if not layout.fits]
    if out:
        yield ""
        yield "does not fit, by GiB:"
        width = max(len(layout.mesh.name) for layout in out)
        for layout in out:
            worst = max(layout.stages, key=lambda stage: stage.needed_bytes)
            beside, size = (worst.steps_bytes + worst.spare) / GIB, worst.gpu_bytes / GIB
            yield (
                f"  {layout.mesh.name:{width}}  {layout.short_bytes / GIB:.1f} short: {worst.weight_bytes / GIB:.1f} "
                f"of weights and {beside:.1f} beside them on GPUs of {size:.1f}"
            )
    if report.notes:
        yield ""
        yield from report.notes


def machine_text(machine: Machine) -> str:
    """GPUs by kind, links and hosts."""
    counts: dict[str, int] = {}
    for gpu in machine.gpus:
        counts[gpu.slug] = counts.get(gpu.slug, 0) + 1
    what = " + ".join(f"{count} x {slug}" for slug, count in counts.items())
    hosts = ""
    if machine.num_hosts > 1:
        hosts = f"; {machine.num_hosts} hosts joined by {machine.network.slug if machine.network else 'nothing priced'}"
    return f"{what}, links: {machine.link.slug if machine.link else 'none'}{hosts}"


def _row(layout: Layout, concurrency: Sequence[int]) -> list[str]:
    worst = layout.stages[layout.worst]
    cells = [layout.mesh.name, f"{max(stage.weight_bytes for stage in layout.stages) / GIB:.1f}"]
    cells += [f"{worst.kv_bytes / GIB:.1f}", f"{layout.kv_tokens:,}"]
    cells += [f"{1e3 * layout.ttft_s:.0f}", f"{layout.prefill_tok_s:,.0f}"]
    for count in concurrency:
        one = layout.decode[count]
        # Fewer run than asked for.
        mark = "*" if one.num_running < count else ""
        cells.append(f"{one.tok_s:,.0f}{mark} {1e3 * one.tpot_s:.1f}")
    return cells


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Names and the last column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    last = len(head) - 1
    for cells in (head, *rows):
        yield "  ".join(
            cell if i == last else f"{cell:{widths[i]}}" if i == 0 else f"{cell:>{widths[i]}}"
            for i, cell in enumerate(cells)
        )


def _splits(layouts: Sequence[Layout]) -> Iterator[str]:
    for layout in layouts:
        if layout.mesh.pp > 1:
            yield f"layers of {layout.mesh.name}: {split_text(layout.mesh.split)}"


def split_text(split: Sequence[int]) -> str:
    """Layers of each stage, of very many the first ones."""
    return ",".join(map(str, split[:MOST_SHOWN])) + (",..." if len(split) > MOST_SHOWN else "")


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns of numbers, the first of names."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, *rows):
        yield "  ".join(f"{cell:{widths[i]}}" if i == 0 else f"{cell:>{widths[i]}}" for i, cell in enumerate(cells))
