"""One layout taken apart: bytes by kind, a step by part, the bubble, and why the split is as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headrace.plan.hardware import GIB
from headrace.plan.inventory import Part
from headrace.plan.load import Load
from headrace.plan.report import MOST_SHOWN, Report, grid, machine_text, split_text
from headrace.plan.search import WORDS, Layout, split_loads
from headrace.schedule.balance import level_sizes

KINDS: tuple[Part, ...] = ("attention", "dense", "router", "experts", "shared", "norm", "embedding", "head")


def explain(report: Report, layout: Layout) -> str:
    """Bytes of every stage by kind, the time of a step by part, the bubble, and why the split is as it is."""
    return "\n".join(_explain_lines(report, layout))


def _explain_lines(report: Report, layout: Layout) -> Iterator[str]:
    yield f"{report.model}, {layout.mesh.name}, layers {split_text(layout.mesh.split)}"
    yield machine_text(layout.machine)
    yield ""
    yield from _memory_lines(layout)
    if layout.fits:
        yield ""
        yield from _time_lines(report, layout)
        yield ""
        yield from _why(report, layout)
    else:
        yield f"does not fit: {layout.short_bytes / GIB:.1f} GiB short on stage {layout.worst}"


def _shown(count: int) -> list[int]:
    return list(range(count)) if count <= MOST_SHOWN else [*range(8), *range(count - 8, count)]


def _memory_lines(layout: Layout) -> Iterator[str]:
    yield "GiB on each GPU of a stage"
    shown = _shown(len(layout.stages))
    present = [kind for kind in KINDS if any(stage.weights.get(kind) for stage in layout.stages)]
    rows = [[kind, *(f"{layout.stages[i].weights.get(kind, 0) / GIB:.2f}" for i in shown)] for kind in present]
    for name in dict.fromkeys(name for stage in layout.stages for name in stage.unused):
        words = name if layout.stages[0].counts_unused else f"({name}, not loaded)"
        rows.append([words, *(f"{layout.stages[i].unused.get(name, 0) / GIB:.2f}" for i in shown)])
    for name, words in (
        ("graphs", "CUDA graphs"),
        ("activations", "largest chunk"),
        ("logits", "logits"),
        ("communication", "communication"),
        ("runtime", "runtime"),
        ("spare", "left alone"),
        ("kv_bytes", "KV cache"),
        ("gpu_bytes", "GPU"),
    ):
        rows.append([words, *(f"{getattr(layout.stages[i], name) / GIB:.2f}" for i in shown)])
    rows.append(["KV tokens", *(f"{layout.stages[i].kv_tokens:,}" for i in shown)])
    yield from grid(["stage", *map(str, shown)], rows)


def _time_lines(report: Report, layout: Layout) -> Iterator[str]:
    question, mesh = report.question, layout.mesh
    cost = question.cost(mesh, layout.machine)
    target = question.demand.target
    pace = layout.decode[target].pace
    sizes = pace.sizes
    load = Load.decode(sizes[0], question.length)
    yield (
        f"a decode step of {target} requests in microbatches of {split_text(sizes)}: "
        f"ms of the largest, each row attending to {question.length} tokens"
    )
    shown = _shown(mesh.pp)
    parts = [cost.parts_s(load, stage) for stage in shown]
    names = [name for name in WORDS if any(name in stage for stage in parts)]
    rows = [[WORDS[name], *(f"{1e3 * stage.get(name, 0):.3f}" for stage in parts)] for name in names]
    rows.append(["together", *(f"{1e3 * sum(stage.values()):.3f}" for stage in parts)])
    rows.append(["bubble", *(f"{pace.bubble[stage]:.0%}" for stage in shown)])
    yield from grid(["stage", *map(str, shown)], rows)
    edges, delays = cost.edges_s(sizes[0])
    if mesh.pp > 1:
        yield (
            f"hop to the next stage: {1e6 * float(edges.max()):.0f} us of its link and "
            f"{1e6 * float(delays.max()):.0f} us of delay; "
            f"round of all microbatches {1e3 * pace.period_s:.2f} ms, set by the {pace.bound}"
        )


def _why(report: Report, layout: Layout) -> Iterator[str]:
    """The split against one with as many layers everywhere."""
    mesh, question = layout.mesh, report.question
    if mesh.pp == 1:
        yield "one stage: nothing to split"
        return
    loads = split_loads(question, mesh)

    def slowest(split: tuple[int, ...]) -> tuple[float, int]:
        cost = question.cost(replace(mesh, split=split), layout.machine)
        each = sum((weight * cost.steps_s(load) for weight, load in loads), np.zeros(mesh.pp))
        return float(each.max()), int(each.argmax())

    even = level_sizes(mesh.num_layers, mesh.pp)
    if even == mesh.split:
        yield "the split: no other is faster than as many layers everywhere"
        return
    (mine_s, _), (even_s, stage) = slowest(mesh.split), slowest(even)
    per = "request" if question.demand.objective == "balanced" else "step"
    yield (
        f"the split: as many layers everywhere ({split_text(even)}) keeps stage {stage} busy {1e3 * even_s:.2f} ms "
        f"a {per}, this one none more than {1e3 * mine_s:.2f}"
    )
    cost = question.cost(mesh, layout.machine)
    parts = cost.parts_s(loads[0][1], mesh.pp - 1)
    layer_s = (sum(parts.values()) - parts.get("head", 0.0)) / mesh.split[-1]
    yield f"  the head, on the last stage alone, takes as long as {parts.get('head', 0.0) / layer_s:.1f} of its layers"
    tokens = [stage.kv_tokens for stage in layout.stages]
    yield (
        f"  room for KV tokens is {min(tokens):,} on stage {layout.worst}, up to {max(tokens):,} elsewhere; "
        "the least counts"
    )
