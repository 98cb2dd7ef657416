"""Measures the engine without HTTP: decode and prefill rates of layouts, through `LLM`, cell by cell into JSON lines.

Decode is the difference of two lengths, so that prompts, starts and ends cancel; prefill the difference of two counts.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bench.gpu_floor import best_decode_floor, decode_floor, prompt_flops, split_of
from bench.gpu_table import append_row, required_ratio, vllm_rate
from bench.gpu_timing import Machine, gpu_memory, machine, one_line

from headrace.config import LayoutConfig, ModelConfig, RunConfig, ScheduleConfig
from headrace.engine.llm import LLM
from headrace.sampling import SamplingParams
from headrace.step import StageStats

EXTRA_PROMPTS = 8
"""By which the larger count of a prefill measurement exceeds the smaller one."""
FIT = 0
"""Stands for as many requests as the KV cache and `max_running` hold."""
MARGIN = 1.3
"""A cell is expected to take this much longer than the longest like it."""

Row = dict[str, Any]


class Fallback(RuntimeError):
    """The workers did not run what was to be measured."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    model: Path
    layouts: Sequence[str]
    splits: Sequence[str]
    requests: Sequence[int]
    """Counts of requests, or `FIT`."""
    prompt: int
    short: int
    """Output length that is subtracted."""
    output: int
    """Tokens by which the longer output exceeds the shorter."""
    prefill: int
    """Prompt length of the prefill cell; 0: no such cell."""
    repeats: int
    device: str
    p2p: bool
    backend: str
    """What every stage must say it ran; "any" asks nothing."""
    options: dict[str, Any]
    """More of `LLM`, by name."""
    out: Path
    again: bool
    budget_s: float
    bytes_per_s: float
    flops_per_s: float
    profile: Path | None = None
    note: str = ""


@dataclass
class Session:
    """A run of the plan: the clock, what is known already, and what cells have cost so far."""

    plan: Plan
    machine: Machine
    started_s: float = field(default_factory=time.monotonic)
    start_cost_s: float = 0.0
    cell_cost_s: dict[str, float] = field(default_factory=dict)
    num_failed: int = 0
    done: set[str] = field(default_factory=set)

    def left_s(self) -> float:
        """Of the budget."""
        return self.plan.budget_s - (time.monotonic() - self.started_s)


def measure_all(plan: Plan) -> int:
    """Measure what is not there yet; the exit code."""
    if not plan.p2p:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    if plan.profile is not None:
        plan.profile.mkdir(parents=True, exist_ok=True)
        os.environ["HEADRACE_PROFILE"] = str(plan.profile.absolute())
    session = Session(plan, machine())
    if plan.out.exists() and not plan.again:
        rows = (json.loads(text) for text in plan.out.read_text().splitlines() if text.strip())
        session.done = {row["key"] for row in rows if not row.get("problem")}
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    for layout in plan.layouts:
        for split in plan.splits:
            if session.left_s() < MARGIN * session.start_cost_s:
                print(f"--budget: stopped before {layout} {split}", flush=True)
                return 1
            try:
                _measure_layout(session, layout, split)
            # One layout that cannot start or breaks says nothing about the next one.
            except Exception as error:
                session.num_failed += 1
                problem = one_line(error)
                print(f"{layout} {split}: FAILED {problem}", flush=True)
                append_row(plan.out, _head(session, layout, split) | {"key": "", "kind": "failed", "problem": problem})
    return 1 if session.num_failed else 0


def layout_of(name: str) -> dict[str, int]:
    """Degrees from `pp2`, `tp2`, `pp2ep2`."""
    found = re.findall(r"(pp|tp|ep)(\d+)", name)
    if not found or "".join(axis + size for axis, size in found) != name:
        raise ValueError(f"layout {name!r}: write pp2, tp2, ep2 or pp2ep2")
    return {axis: int(size) for axis, size in found}


def _cells(plan: Plan) -> Iterator[tuple[str, int]]:
    yield from (("decode", count) for count in plan.requests)
    if plan.prefill:
        yield "prefill", 0


def _key(session: Session, layout: str, split: str, kind: str, count: int) -> str:
    plan = session.plan
    lengths = [plan.prefill] if kind == "prefill" else [count, plan.prompt, plan.short, plan.output]
    where = [session.machine.gpu, plan.device, plan.model.name, layout, split, "p2p" if plan.p2p else "no-p2p"]
    return " ".join(map(str, [*where, kind, *lengths, json.dumps(plan.options, sort_keys=True), plan.note]))


def _head(session: Session, layout: str, split: str) -> Row:
    plan = session.plan
    return session.machine.record() | {
        "model": plan.model.name, "device": plan.device, "layout": layout, "asked_split": split, "p2p": plan.p2p,
        "options": plan.options, "note": plan.note,
    }  # fmt: skip


def _measure_layout(session: Session, layout: str, split: str) -> None:
    plan = session.plan
    cells = [cell for cell in _cells(plan) if _key(session, layout, split, *cell) not in session.done]
    if not cells:
        print(f"{layout} {split}: all there already", flush=True)
        return
    started = time.monotonic()
    with LLM(str(plan.model), **_options(plan, layout, split)) as llm:
        session.start_cost_s = max(session.start_cost_s, time.monotonic() - started)
        _check_backend(llm.status.stages, plan)
        head = _head(session, layout, split) | {
            "split": list(llm.mesh.split), "start_s": round(time.monotonic() - started, 2),
            "load_s": round(llm.status.load_s, 2), "kv_tokens": llm.status.kv_tokens, "gpu_bytes": gpu_memory(),
            "weight_bytes": [stage.weight_bytes for stage in llm.status.stages],
            "backend": [getattr(stage, "backend", None) for stage in llm.status.stages],
        }  # fmt: skip
        gib = " ".join(f"{used / (1 << 30):.0f}" for used in head["gpu_bytes"])
        print(
            f"{layout} {','.join(map(str, llm.mesh.split))}: ready after {head['start_s']} s "
            f"(weights {head['load_s']} s), GPU memory {gib or '-'} GiB, {head['kv_tokens']} KV tokens",
            flush=True,
        )
        before = llm.settle().stages
        for kind, count in cells:
            if session.left_s() < MARGIN * session.cell_cost_s.get(kind, 0.0):
                print(f"--budget: stopped before {layout} {kind} {count}", flush=True)
                session.num_failed += 1
                return
            began = time.monotonic()
            row = _decode(llm, plan, count or _most(llm, plan)) if kind == "decode" else _prefill(llm, plan)
            after = llm.settle().stages
            _check_backend(after, plan)
            shares, before = busy_shares(before, after), after
            row.setdefault("busy", shares)
            session.cell_cost_s[kind] = max(session.cell_cost_s.get(kind, 0.0), time.monotonic() - began)
            row = head | row | {"key": _key(session, layout, split, kind, count), "kind": kind}
            append_row(plan.out, row)
            print(line(row), flush=True)


def _options(plan: Plan, layout: str, split: str) -> dict[str, Any]:
    wanted = {"device": plan.device, **layout_of(layout), **plan.options}
    if (counts := split_of(split)) is not None:
        wanted["split"] = counts
    kinds = (ModelConfig, LayoutConfig, ScheduleConfig, RunConfig)
    unknown = wanted.keys() - {one.name for kind in kinds for one in fields(kind)}
    if unknown:
        raise ValueError(f"no option {', '.join(sorted(unknown))} in this version")
    return wanted


def _check_backend(stages: Sequence[StageStats], plan: Plan) -> None:
    """Raise where a worker ran something slower than what is measured, or does not say what it ran."""
    if plan.backend == "any":
        return
    said = [getattr(stage, "backend", "unknown") for stage in stages]
    if not said or set(said) != {plan.backend}:
        raise Fallback(f"stages ran {said}, {plan.backend} is to be measured")


# --- the two measurements -------------------------------------------------------------------------------------------


def _most(llm: LLM, plan: Plan) -> int:
    """Requests that the KV cache holds, each in whole pages; no more than may run."""
    schedule = ScheduleConfig(
        **{one.name: plan.options[one.name] for one in fields(ScheduleConfig) if one.name in plan.options}
    )
    pages = -(-(plan.prompt + plan.short + plan.output) // schedule.page_size)
    return min(schedule.max_running, llm.status.kv_tokens // (pages * schedule.page_size))


def _decode(llm: LLM, plan: Plan, count: int) -> Row:
    """Tokens a second of `count` requests that all decode."""
    source = random.Random(count)
    lengths = (plan.short, plan.short + plan.output)
    _timed(llm, source, count, plan.prompt, plan.short)
    first = [_timed(llm, source, count, plan.prompt, 1) for _ in range(plan.repeats)]
    rates, spent = [], []
    for _ in range(plan.repeats):
        times = []
        marks = [llm.settle().stages]
        for length in lengths:
            times.append(_timed(llm, source, count, plan.prompt, length))
            marks.append(llm.settle().stages)
        rates.append(count * plan.output / (times[1] - times[0]))
        spent.append(marks)
    rate = statistics.median(rates)
    floor = decode_floor(llm.spec, llm.mesh, count, plan.bytes_per_s)
    best, split = best_decode_floor(llm.spec, llm.mesh, count, plan.bytes_per_s)
    return {
        "requests": count, "prompt": plan.prompt, "short": plan.short, "output": plan.output, "rate": rate,
        "rates": rates, "spread": (max(rates) - min(rates)) / rate, "step_ms": 1e3 * count / rate,
        "first_s": statistics.median(first), "floor": floor, "best_floor": best, "best_split": list(split),
        "busy": decode_shares(spent),
    }  # fmt: skip


def _prefill(llm: LLM, plan: Plan) -> Row:
    """Prompt tokens a second once every stage has its chunk."""
    source = random.Random(-1)
    counts = (2 * llm.mesh.pp, 2 * llm.mesh.pp + EXTRA_PROMPTS)
    _timed(llm, source, counts[0], plan.prefill, 1)
    rates = []
    for _ in range(plan.repeats):
        times = [_timed(llm, source, count, plan.prefill, 1) for count in counts]
        rates.append(EXTRA_PROMPTS * plan.prefill / (times[1] - times[0]))
    rate = statistics.median(rates)
    flops = rate / plan.prefill * prompt_flops(llm.spec, plan.prefill)
    return {
        "requests": counts[1], "prompt": plan.prefill, "rate": rate, "rates": rates,
        "spread": (max(rates) - min(rates)) / rate, "tflops": flops / 1e12,
        "of_product_rate": flops / (plan.flops_per_s * llm.mesh.num_ranks),
    }  # fmt: skip


def _timed(llm: LLM, source: random.Random, count: int, prompt: int, output: int) -> float:
    """Seconds of `count` greedy requests at once; prompts are new ones every time."""
    prompts = [source.choices(range(llm.spec.vocab_size), k=prompt) for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    made = llm.generate(prompts, params)
    spent = time.perf_counter() - started
    short = [len(one.token_ids) for one in made if len(one.token_ids) != output]
    if short:
        raise Fallback(f"{len(short)} of {count} requests gave {short[0]} tokens where {output} were asked for")
    return spent


def busy_shares(before: Sequence[StageStats], after: Sequence[StageStats]) -> list[float | None]:
    """By stage: time on steps over time with plans in flight, between two settled statuses."""
    shares: list[float | None] = []
    earlier = {stage.stage: stage for stage in before}
    for stage in after:
        old = earlier.get(stage.stage)
        active = stage.active_s - (old.active_s if old else 0.0)
        busy = stage.busy_s - (old.busy_s if old else 0.0)
        shares.append(round(busy / active, 3) if active > 0 else None)
    return shares


def decode_shares(spent: Sequence[Sequence[Sequence[StageStats]]]) -> list[float]:
    """By stage: busy over active time of the steps by which the longer outputs exceed the shorter.

    spent: by repeat, statuses before the shorter outputs, between, and after the longer ones. So prompts cancel, and
    what a step of a new shape costs once.
    """

    def gained(before: StageStats, after: StageStats) -> tuple[float, float]:
        return after.busy_s - before.busy_s, after.active_s - before.active_s

    shares = []
    for stage in range(len(spent[0][0])):
        busy = active = 0.0
        for before, between, after in spent:
            short, long = gained(before[stage], between[stage]), gained(between[stage], after[stage])
            busy += long[0] - short[0]
            active += long[1] - short[1]
        shares.append(round(busy / active, 3))
    return shares


def line(row: Row) -> str:
    """One cell, compact."""
    busy = "/".join("-" if share is None else f"{share:.0%}" for share in row["busy"])
    where = f"{row['layout']} {','.join(map(str, row['split']))}" + ("" if row["p2p"] else " no-p2p")
    text = f"{where} {row['kind']} n={row['requests']} {row['rate']:.0f} tok/s ±{row['spread']:.0%} busy {busy}"
    if row["kind"] == "prefill":
        return f"{text} {row['tflops']:.0f} TFLOPS {row['of_product_rate']:.0%} of the product rate"
    text += f" step {row['step_ms']:.2f} ms floor {row['rate'] / row['floor']:.0%}"
    if row["best_split"] != row["split"]:
        text += f" (best split {','.join(map(str, row['best_split']))} {row['rate'] / row['best_floor']:.0%})"
    if (other := vllm_rate(row)) is not None:
        text += f" vLLM x{row['rate'] / other:.2f} needs {required_ratio(row['requests'])}"
    return text
