"""Measures one rank of a layout on one GPU: steps of decode rows and of prompts, beside what the planner expects."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from bench.gpu_table import append_row
from bench.gpu_timing import Machine, machine
from bench.lone_rank import LoneRank

from headrace.config import EngineConfig, LayoutConfig, ModelConfig, ScheduleConfig
from headrace.errors import UserError
from headrace.mesh import Mesh, build_mesh
from headrace.plan import hardware
from headrace.plan.cost import Roofline
from headrace.plan.experts import Uniform
from headrace.plan.hardware import catalogue, find_gpu
from headrace.plan.load import Load
from headrace.spec import ModelSpec, MoeSpec
from headrace.weights.source import read_spec, resolve

Row = dict[str, Any]

WARM, STEPS = 8, 32
"""Decode steps before the first that counts, and of each repeat."""
PROMPTS = 4
"""Of each repeat."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What to measure."""

    model: Path
    layout: str
    split: tuple[int, ...] | None
    stage: int
    rows: Sequence[int]
    """Decode rows of a step."""
    prompt: int
    """Positions before them."""
    prefill: int
    """Tokens of a prompt; 0: none."""
    repeats: int
    device: Literal["cuda", "cpu"]
    dtype: Literal["bfloat16", "float32"]
    backend: str
    """What the rank must say it ran; "any" asks nothing."""
    out: Path
    note: str = ""


def measure_rank(plan: RankPlan) -> int:
    """Append a record for every size; the exit code."""
    on = machine()
    layout = LayoutConfig(layout=plan.layout, split=plan.split)
    mesh = build_mesh(layout, read_spec(resolve(str(plan.model), say=lambda _: None)))
    if not 0 <= plan.stage < mesh.pp:
        raise UserError(f"--stage {plan.stage}: {plan.layout} has stages 0 to {mesh.pp - 1}")
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here; --device cpu runs on the processor")
    most = max(plan.prefill, max(plan.rows, default=0) * (plan.prompt + WARM + STEPS * plan.repeats))
    rank = LoneRank(_config(plan, layout), mesh.ranks_of(plan.stage)[0], most)
    if plan.backend not in ("any", rank.backend):
        print(f"{plan.layout}: the rank ran {rank.backend}, {plan.backend} is to be measured")
        return 1
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    for row in _rows(plan, rank, on):
        append_row(plan.out, row)
        print(line(row), flush=True)
    return 0


def _config(plan: RankPlan, layout: LayoutConfig) -> EngineConfig:
    on_gpu = plan.device == "cuda"
    return EngineConfig(
        model=ModelConfig(
            model=str(plan.model), device=plan.device, dtype=plan.dtype, weights="random", routing="uniform",
            attention="triton" if on_gpu else "torch",
            max_len=max(plan.prompt + WARM + STEPS * plan.repeats, plan.prefill) + 1,
        ),
        layout=layout,
        schedule=ScheduleConfig(
            max_running=max(plan.rows, default=1), chunk=max(plan.prefill, plan.prompt), run_ahead=2 if on_gpu else 0
        ),
    )  # fmt: skip


def _rows(plan: RankPlan, rank: LoneRank, on: Machine) -> Iterator[Row]:
    head = on.record() | {
        "kind": "rank", "model": plan.model.name, "layout": plan.layout, "split": list(rank.mesh.split),
        "stage": plan.stage, "weight_bytes": rank.weight_bytes, "backend": rank.backend, "note": plan.note,
    }  # fmt: skip
    for count in plan.rows:
        times = rank.decode(count, plan.prompt, WARM, STEPS, plan.repeats)
        # Halfway through what was measured.
        length = plan.prompt + WARM + STEPS * plan.repeats // 2
        yield head | _step(plan, rank, on, Load.decode(count, length), times) | {"rows": count, "prompt": plan.prompt}
    if plan.prefill:
        times = rank.prefill(plan.prefill, PROMPTS, plan.repeats)
        load = Load.prompt(0, plan.prefill, samples=True)
        yield head | _step(plan, rank, on, load, times) | {"rows": 0, "prompt": plan.prefill}


def _step(plan: RankPlan, rank: LoneRank, on: Machine, load: Load, times: Sequence[float]) -> Row:
    middle = statistics.median(times)
    split = ",".join(map(str, rank.mesh.split))
    return {
        "key": f"{on.gpu} rank {plan.model.name} {plan.layout} {split} stage {plan.stage} {load} {plan.note}",
        "step_ms": 1e3 * middle,
        "spread": (max(times) - min(times)) / middle,
        "predicted_ms": predicted_ms(rank.spec, rank.mesh, plan.stage, load, on.gpu),
    }


def predicted_ms(spec: ModelSpec, mesh: Mesh, stage: int, load: Load, gpu: str) -> float | None:
    """A step of a stage's average rank, links apart, as the planner prices it; None for a GPU that it does not know."""
    kind = find_gpu(catalogue(), gpu)
    if kind is None:
        return None
    cost = Roofline(spec, mesh, hardware.Machine(gpus=(kind,) * mesh.num_ranks, link=None), Average())
    return 1e3 * float(cost.steps_s(load)[stage])


class Average(Uniform):
    """Uniform routing as a rank meets it on average, not the fullest one of a stage."""

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """Its share of what all ranks touch."""
        return super().distinct(moe, tokens, 1) / ranks

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """The mean."""
        return tokens * moe.top_k / ranks


def line(row: Row) -> str:
    """One record, compact."""
    what = f"{row['rows']} rows" if row["rows"] else f"prompt of {row['prompt']}"
    text = f"{row['layout']} stage {row['stage']}: {what} {row['step_ms']:.3f} ms ±{row['spread']:.0%}"
    if row["predicted_ms"] is None:
        return text
    return f"{text}, predicted {row['predicted_ms']:.3f} ({row['predicted_ms'] / row['step_ms'] - 1:+.1%})"
