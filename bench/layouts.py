"""What layouts of many GPUs would do: ranks measured alone (`bench.gpu rank`), sums, edges and the pipeline as planned.

`python -m bench.layouts --plot docs/layouts.png` prints the tables of docs/layouts.md. Each cell is composed of
measured steps, and in brackets what the planner says by itself. Where experts are spread, a step is longer by what the
fullest rank has above the average one, as planned.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.gpu import ENGINE, ROOT
from bench.gpu_table import read_rows, table

from headrace.config import LayoutConfig
from headrace.mesh import FloatArray, Mesh, build_mesh
from headrace.plan.cost import CostModel, Roofline
from headrace.plan.experts import Uniform
from headrace.plan.hardware import Machine, catalogue
from headrace.plan.load import Load
from headrace.plan.memory import Limits, stage_memory
from headrace.plan.pace import Pace, decode_pace, decode_sizes, first_token_s, prefill_pace
from headrace.plan.reads import decode_balance
from headrace.spec import ModelSpec
from headrace.weights.source import read_spec, resolve

Row = dict[str, Any]

COUNTS = (1, 8, 32, 128, 256)
PROMPT, CONTEXT, CHUNK, MORE, RUN_AHEAD = 128, 192, 8192, 256, 2
LIMITS = Limits(chunk=CHUNK, max_running=1024, run_ahead=RUN_AHEAD)
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#ff9da6")


@dataclass(frozen=True)
class Ratios:
    """Measured over predicted steps of one rank: of decode rows by their number, and of a prompt."""

    rows: tuple[tuple[int, float], ...]
    prompt: float

    @classmethod
    def of(cls, records: Sequence[Row]) -> Ratios:
        """From the records of one rank."""
        ratios = {row["rows"]: row["step_ms"] / row["predicted_ms"] for row in records}
        prompt = ratios.pop(0, 1.0)
        return cls(tuple(sorted(ratios.items())), prompt)

    def at(self, load: Load) -> float:
        """Between sizes by their logarithm, beyond them that of the nearest."""
        if load.decodes < load.tokens or not self.rows:
            return self.prompt
        sizes, ratios = zip(*self.rows, strict=True)
        return float(np.interp(math.log(load.tokens), np.log(sizes), ratios))


class Composed:
    """A cost model whose products and reads take as much longer than planned as they did where a rank was measured."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, machine: Machine, ratios: Ratios) -> None:
        self._whole = Roofline(spec, mesh, machine, Uniform())
        self._alone = Roofline(spec, mesh, replace(machine, link=None), Uniform())
        self._ratios = ratios
        self.num_stages = mesh.pp
        self.feedback_s, self.host_s = self._whole.feedback_s, self._whole.host_s

    def steps_s(self, load: Load) -> FloatArray:
        """[P]"""
        alone = self._alone.steps_s(load)
        total: FloatArray = alone * self._ratios.at(load) + self._whole.steps_s(load) - alone
        return total

    def edges_s(self, tokens: int) -> tuple[FloatArray, FloatArray]:
        """As planned."""
        return self._whole.edges_s(tokens)


def latest_ranks(rows: Iterable[Row], model: str) -> dict[str, list[Row]]:
    """Records of lone ranks by layout: of the rank that was measured last, and of each size the last one."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("kind") == "rank" and row["model"] == model and row["predicted_ms"] is not None:
            found.setdefault(row["layout"], []).append(row)
    return {layout: _of_one_rank(records) for layout, records in found.items()}


def _of_one_rank(records: Sequence[Row]) -> list[Row]:
    same = [
        row for row in records if all(row[field] == records[-1][field] for field in ("gpu", "split", "stage", "note"))
    ]
    return list({(row["rows"], row["prompt"]): row for row in same}.values())


def mesh_of(spec: ModelSpec, layout: str, split: Sequence[int] | None) -> Mesh:
    """With the split that was measured."""
    return build_mesh(LayoutConfig(layout=layout, split=None if split is None else tuple(split)), spec)


def pace_of(spec: ModelSpec, mesh: Mesh, cost: CostModel, count: int, context: int = CONTEXT) -> Pace:
    """Decode of so many requests."""
    return decode_pace(cost, decode_sizes(count, mesh.pp, decode_balance(spec, mesh)), context, RUN_AHEAD)


def paces(spec: ModelSpec, mesh: Mesh, cost: CostModel) -> list[Pace]:
    """Decode at every count of requests."""
    return [pace_of(spec, mesh, cost, count) for count in COUNTS]


# --- tables ---------------------------------------------------------------------------------------------------------


def ranks_table(ranks: dict[str, list[Row]]) -> str:
    """Measured and predicted steps of each rank."""
    lines = []
    for layout, records in ranks.items():
        cells = []
        for row in sorted(records, key=lambda row: (row["rows"] == 0, row["rows"])):
            what = f"{row['rows']}" if row["rows"] else f"prompt of {row['prompt']}"
            error = row["predicted_ms"] / row["step_ms"] - 1
            cells.append(f"{what}: {row['step_ms']:.2f} ({error:+.0%})")
        lines.append([f"{layout}, stage {records[0]['stage']}", *cells])
    width = max(len(line) for line in lines)
    return table(["rank of", "decode rows: ms a step (planned)", *[""] * (width - 2)], lines, left=width)


def decode_table(spec: ModelSpec, ranks: dict[str, list[Row]], machine: Machine) -> str:
    """Tokens a second, and how idle the idlest stage is."""
    lines = []
    for layout, records in ranks.items():
        mesh = mesh_of(spec, layout, records[0]["split"])
        composed = paces(spec, mesh, Composed(spec, mesh, machine, Ratios.of(records)))
        planned = paces(spec, mesh, Roofline(spec, mesh, machine, Uniform()))
        rates = [
            f"{count / one.period_s:,.0f} ({count / other.period_s:,.0f})"
            for count, one, other in zip(COUNTS, composed, planned, strict=True)
        ]
        idle = [f"{pace.bubble.max():.0%}" for pace in composed if mesh.pp > 1]
        lines.append([layout, *rates, " ".join(idle[i] for i in (0, 2, 4)) if idle else ""])
    return table(["layout", *map(str, COUNTS), "idlest stage at 1, 32, 256"], lines)


def prompt_table(spec: ModelSpec, ranks: dict[str, list[Row]], machine: Machine) -> str:
    """Prefill rates, times to the first token, and what long prompts leave room for."""
    lines = []
    for layout, records in ranks.items():
        mesh = mesh_of(spec, layout, records[0]["split"])
        cost = Composed(spec, mesh, machine, Ratios.of(records))
        rate, _, _ = prefill_pace(cost, CHUNK, CHUNK)
        first = [1e3 * first_token_s(cost, length, CHUNK) for length in (PROMPT, CHUNK)]
        stages = [stage_memory(spec, mesh, machine, stage, LIMITS) for stage in range(mesh.pp)]
        weights = max(stage.weight_bytes for stage in stages) / 2**30
        most = min(LIMITS.max_running, min(stage.kv_tokens for stage in stages) // (CHUNK + MORE))
        full = most / pace_of(spec, mesh, cost, most, CHUNK + MORE // 2).period_s
        cells = [f"{rate:,.0f}", *(f"{one:,.0f}" for one in first), f"{weights:.1f}", f"{most}", f"{full:,.0f}"]
        lines.append([layout, *cells])
    head = ["layout", f"prompts of {CHUNK}, tokens/s", f"first token of {PROMPT}, ms", f"of {CHUNK}, ms"]
    head += ["fullest rank, GiB", f"{CHUNK} + {MORE} tokens: requests that fit", "decode of so many"]
    return table(head, lines)


# --- the picture ----------------------------------------------------------------------------------------------------


def draw(case: Case, path: Path) -> None:
    """Decode by requests, one panel for each way that the GPUs are joined."""
    from matplotlib.figure import Figure

    spec = case.spec
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    axes = figure.subplots(1, len(LINKS), sharey=True)
    for axis, (links, title) in zip(axes, LINKS.items(), strict=True):
        machine = machine_with(case.num_gpus, links)
        for colour, (layout, records) in zip(COLOURS, case.ranks.items(), strict=False):
            mesh = mesh_of(spec, layout, records[0]["split"])
            found = paces(spec, mesh, Composed(spec, mesh, machine, Ratios.of(records)))
            rates = [count / pace.period_s for count, pace in zip(COUNTS, found, strict=True)]
            axis.plot(COUNTS, rates, marker="o", markersize=4, color=colour, label=layout)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(COUNTS, map(str, COUNTS))
        axis.set_xlabel("requests that decode")
        axis.set_title(title, fontsize=10)
        axis.grid(visible=True, which="both", alpha=0.25)
    axes[0].set_ylabel("tokens a second")
    axes[0].legend(loc="upper left", fontsize=9)
    figure.suptitle(
        f"Kimi K2, {spec.num_layers} layers, {case.num_gpus} H200: measured ranks, planned links", fontsize=11
    )
    figure.savefig(path, dpi=110)


# --- the command ----------------------------------------------------------------------------------------------------

LINKS = {
    "nvlink-h200": "NVLink",
    "pcie5-x16-host": "through host memory over PCIe 5",
    "pcie4-x16-host": "through host memory over PCIe 4",
}
"""The second has sums of two H200, scaled to more GPUs, the third those that others measured on eight L40S."""
SCARCE = "pcie4-x16-host"
"""Left out but where eight GPUs decode: nothing else of it is new."""
MODELS = {"k2": 8, "k2-24": 4}
"""Folders of bench/configs, and the GPUs that they are for."""


@dataclass(frozen=True)
class Case:
    """A model, how many GPUs it is for, and what was measured of its layouts, fewest stages last."""

    spec: ModelSpec
    num_gpus: int
    ranks: dict[str, list[Row]]

    @classmethod
    def of(cls, name: str, rows: Iterable[Row]) -> Case:
        """From the records of all models."""
        spec = read_spec(resolve(str(ROOT / "bench" / "configs" / name), say=lambda _: None))
        ranks = latest_ranks(rows, name)
        order = sorted(ranks, key=lambda layout: mesh_of(spec, layout, None).tp)
        return cls(spec, MODELS[name], {layout: ranks[layout] for layout in order})


def sections(case: Case) -> Iterator[tuple[str, str]]:
    """Titles and tables."""
    spec, ranks, where = case.spec, case.ranks, f"{case.num_gpus} H200"
    yield f"Ranks alone, {spec.num_layers} layers", ranks_table(ranks)
    for links, title in LINKS.items():
        if links != SCARCE or case.num_gpus == 8:
            yield f"{where}, {title}: decode, tokens/s", decode_table(spec, ranks, machine_with(case.num_gpus, links))
    for links, title in LINKS.items():
        if links == SCARCE:
            continue
        yield f"{where}, {title}: prompts", prompt_table(spec, ranks, machine_with(case.num_gpus, links))


def machine_with(count: int, links: str) -> Machine:
    """So many H200."""
    return Machine(gpus=(catalogue().gpu("h200"),) * count, link=catalogue().link(links))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description=__doc__)
    parser.add_argument("--ranks", type=Path, default=ENGINE, metavar="FILE", help="records (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="picture to write, .png or .svg")
    options = parser.parse_args(arguments)
    rows = read_rows(options.ranks)
    cases = [case for case in (Case.of(name, rows) for name in MODELS) if case.ranks]
    if not cases:
        print(f"{options.ranks}: holds no ranks; python -m bench.gpu rank measures them", file=sys.stderr)
        return 2
    for case in cases:
        for title, text in sections(case):
            print(f"## {title}\n\n{text}\n")
    if options.plot is not None:
        draw(cases[0], options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
