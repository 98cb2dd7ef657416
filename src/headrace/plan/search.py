"""Layouts of a model on a machine: which there are, how each is best split, what it gives and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from headrace.config import LayoutConfig
from headrace.errors import UserError
from headrace.mesh import FloatArray, Mesh, build_mesh
from headrace.plan.cost import Roofline
from headrace.plan.experts import Routing
from headrace.plan.hardware import Machine
from headrace.plan.load import Load
from headrace.plan.memory import Limits, StageMemory, stage_memory
from headrace.plan.options import DemandConfig, FixedConfig
from headrace.plan.pace import Pace, decode_pace, decode_sizes, first_token_s, prefill_pace, prompt_loads
from headrace.plan.reads import decode_balance
from headrace.plan.split import Splitter
from headrace.schedule.balance import Balance
from headrace.spec import ModelSpec

WORDS = {
    "experts": "reading experts",
    "attention": "attention",
    "dense": "dense layers",
    "shared": "shared experts",
    "router": "routing",
    "head": "the head",
    "norm": "norms",
    "embedding": "the embedding",
    "launches": "kernel launches",
    "sums": "all-reduces",
}
"""Parts of a step, as what limits a layout."""


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Steady decode of some number of requests."""

    tok_s: float
    tpot_s: float
    num_running: int
    """As many as the KV cache holds at once, at most."""
    pace: Pace


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run the model, priced."""

    mesh: Mesh
    machine: Machine
    """Its GPUs by rank."""
    stages: Sequence[StageMemory]
    kv_tokens: int
    short_bytes: float
    """By how much the worst stage does not fit; 0 where all fit."""
    decode: Mapping[int, Decode]
    """By the number of requests; empty where it does not fit."""
    prefill_tok_s: float
    ttft_s: float
    limited_by: str
    score: float
    """Higher is better, in the objective's own terms."""

    @property
    def fits(self) -> bool:
        """Whether every stage holds its weights, its steps and the longest request."""
        return self.short_bytes <= 0

    @property
    def worst(self) -> int:
        """The stage with the least left for the KV cache, in tokens."""
        return min(
            range(len(self.stages)), key=lambda stage: self.stages[stage].kv_bytes / self.stages[stage].kv_token_bytes
        )


@dataclass(frozen=True, kw_only=True)
class Question:
    """What layouts are judged by."""

    spec: ModelSpec
    demand: DemandConfig
    limits: Limits
    routing: Routing

    @property
    def longest(self) -> int:
        """Tokens of a request that must fit."""
        return self.demand.max_len or self.demand.input + self.demand.output

    def cost(self, mesh: Mesh, machine: Machine) -> Roofline:
        """What a layout's steps cost."""
        return Roofline(self.spec, mesh, machine, self.routing, self.limits.kv_value_bytes)

    @property
    def length(self) -> int:
        """Positions that a decode row attends to, on average."""
        return self.demand.input + self.demand.output // 2


def search(question: Question, machine: Machine, fixed: FixedConfig) -> list[Layout]:
    """Every layout there is on the machine's GPUs, best first, those that do not fit last. Raises UserError."""
    found = [judge(question, mesh, machine, fixed.split is not None) for mesh in meshes(question.spec, machine, fixed)]
    return sorted(found, key=lambda layout: (not layout.fits, -layout.score, layout.short_bytes))


def meshes(spec: ModelSpec, machine: Machine, fixed: FixedConfig) -> list[Mesh]:
    """Layouts that use all GPUs, or as many as any layout can. Raises UserError where what is fixed allows none."""
    if all(degree is not None for degree in (fixed.pp, fixed.tp, fixed.ep)) or fixed.split is not None:
        _check_fixed(spec, fixed)
    refused: list[UserError] = []
    for count in range(len(machine.gpus), 0, -1):
        if count % machine.num_hosts:
            continue
        found = []
        for layout in _layouts(count, fixed):
            try:
                found.append(build_mesh(layout, spec))
            except UserError as error:
                refused.append(error)
        if found:
            return found
    if refused:
        raise refused[0]
    degrees = {"pp": fixed.pp, "tp": fixed.tp, "ep": fixed.ep}
    flags = " ".join(f"--{name} {degree}" for name, degree in degrees.items() if degree is not None)
    raise UserError(f"{flags}: no such layout of {len(machine.gpus)} GPUs")


def _check_fixed(spec: ModelSpec, fixed: FixedConfig) -> None:
    """What is wrong with a layout of which all is given is said as `serve` says it."""
    pp = fixed.pp or (len(fixed.split) if fixed.split is not None else 1)
    build_mesh(LayoutConfig(pp=pp, tp=fixed.tp or fixed.ep or 1, ep=fixed.ep or 1, split=fixed.split), spec)


def _layouts(count: int, fixed: FixedConfig) -> Iterator[LayoutConfig]:
    stages = len(fixed.split) if fixed.split is not None and fixed.pp is None else fixed.pp
    for tp in (degree for degree in range(1, count + 1) if count % degree == 0):
        pp = count // tp
        if stages not in (None, pp) or fixed.tp not in (None, tp):
            continue
        for ep in (degree for degree in range(1, tp + 1) if tp % degree == 0):
            if fixed.ep in (None, ep):
                yield LayoutConfig(pp=pp, tp=tp, ep=ep, split=fixed.split)


def judge(question: Question, mesh: Mesh, machine: Machine, keep_split: bool = False) -> Layout:
    """Split and price one layout."""
    machine = replace(machine, gpus=machine.gpus[: mesh.num_ranks])
    if not keep_split:
        mesh = replace(mesh, split=_split(question, mesh, machine) or mesh.split)
    spec, demand, limits = question.spec, question.demand, question.limits
    stages = [stage_memory(spec, mesh, machine, stage, limits) for stage in range(mesh.pp)]
    short = max(question.longest * stage.kv_token_bytes - stage.kv_bytes for stage in stages)
    held = min(stage.kv_tokens for stage in stages)
    decode: dict[int, Decode] = {}
    prefill_tok_s = ttft_s = score = 0.0
    limited_by = "memory"
    if short <= 0:
        cost = question.cost(mesh, machine)
        balance = decode_balance(spec, mesh)
        decode = {count: _decode(question, cost, mesh, balance, count, held) for count in demand.concurrency}
        prefill_tok_s, steps, edges = prefill_pace(cost, demand.input, limits.chunk)
        ttft_s = first_token_s(cost, demand.input, limits.chunk)
        score = _score(demand, list(decode.values()), prefill_tok_s)
        limited_by = _limit(question, cost, decode[demand.target], steps, edges)
    return Layout(
        mesh=mesh,
        machine=machine,
        stages=stages,
        kv_tokens=held,
        short_bytes=max(0.0, short),
        decode=decode,
        prefill_tok_s=prefill_tok_s,
        ttft_s=ttft_s,
        limited_by=limited_by,
        score=score,
    )


def split_loads(question: Question, mesh: Mesh) -> list[tuple[float, Load]]:
    """The steps that stages are levelled for, and how much of the time each counts."""
    demand, limits = question.demand, question.limits
    rows = -(-demand.target // min(mesh.pp, demand.target))
    decode = Load.decode(rows, question.length)
    prompts = prompt_loads(demand.input, limits.chunk)
    if demand.objective == "decode":
        return [(1.0, decode)]
    if demand.objective == "prefill":
        return [(1.0, load) for load in prompts]
    # A request takes its share of as many decode steps as it has tokens, and of its prompt's chunks.
    num_prompts = sum(load.tokens for load in prompts) / demand.input
    return [(demand.output / rows, decode), *((1 / num_prompts, load) for load in prompts)]


def _split(question: Question, mesh: Mesh, machine: Machine) -> tuple[int, ...] | None:
    """The best split with a KV cache for all requests at the target, or for one; None where none fits."""
    splitter = Splitter(question.spec, mesh, machine, question.routing, question.limits.kv_value_bytes)
    loads = split_loads(question, mesh)
    all_of_them = question.demand.target * (question.demand.input + question.demand.output)
    for num_tokens in (max(question.longest, all_of_them), question.longest, 0):
        split = splitter.fastest_of(loads, question.limits, num_tokens)
        if split is not None:
            return split
    return splitter.smallest(question.limits)


def _decode(question: Question, cost: Roofline, mesh: Mesh, balance: Balance, count: int, held: int) -> Decode:
    """With as many requests under way as the KV cache holds; the others wait."""
    demand = question.demand
    running = max(1, min(count, question.limits.max_running, held // (demand.input + demand.output)))
    sizes = decode_sizes(running, mesh.pp, balance)
    pace = decode_pace(cost, sizes, question.length, question.limits.run_ahead)
    return Decode(tok_s=running / pace.period_s, tpot_s=pace.period_s, num_running=running, pace=pace)


def _score(demand: DemandConfig, decode: Sequence[Decode], prefill_tok_s: float) -> float:
    """Tokens a second, prompt tokens a second, or requests a second; the mean over loads is geometric."""
    if demand.objective == "prefill":
        return prefill_tok_s
    rates = [one.tok_s for one in decode]
    if demand.objective == "balanced":
        rates = [1 / (demand.output / rate + demand.input / prefill_tok_s) for rate in rates]
    return exp(sum(map(log, rates)) / len(rates))


def _limit(question: Question, cost: Roofline, decode: Decode, steps: FloatArray, edges: FloatArray) -> str:
    """What to mend first."""
    if question.demand.objective == "prefill":
        if float(edges.max(initial=0.0)) > float(steps.max()):
            return "the link between stages"
        stage, load = int(steps.argmax()), prompt_loads(question.demand.input, question.limits.chunk)[0]
        return _dominant(cost, load, stage)
    if decode.num_running < question.demand.target:
        return "the KV cache"
    if decode.pace.bound == "edge":
        return "the link between stages"
    if decode.pace.bound == "trip" and len(decode.pace.sizes) < cost.num_stages:
        return "too few requests to fill the stages"
    if decode.pace.bound == "trip":
        return "the trip through all stages"
    return _dominant(cost, Load.decode(decode.pace.sizes[0], question.length), decode.pace.stage)


def _dominant(cost: Roofline, load: Load, stage: int) -> str:
    parts = cost.parts_s(load, stage)
    name = max(parts, key=parts.__getitem__)
    words = WORDS[name]
    if name == "experts" and load.tokens > 1024:
        words = "computing experts"
    return words if cost.num_stages == 1 else f"{words} (stage {stage})"


def enough_gpus(question: Question, machine: Machine, most: int = 64) -> tuple[int, Layout] | None:
    """How many of such GPUs would do, by doubling, and the best layout of them; None where that many never would."""
    while 2 * len(machine.gpus) <= most:
        machine = replace(machine, gpus=machine.gpus * 2)
        try:
            best = search(question, machine, FixedConfig())[0]
        except UserError:
            return None
        if best.fits:
            return len(machine.gpus), best
    return None
