"""`headrace plan`: layouts of a model on a machine, priced and ranked, before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from headrace.errors import UserError
from headrace.plan.emit import emit
from headrace.plan.experts import Skewed, Uniform
from headrace.plan.explain import explain
from headrace.plan.hardware import Machine
from headrace.plan.history import errors, history_text, read_history
from headrace.plan.inventory import rank_bytes
from headrace.plan.machines import Look, find_machine
from headrace.plan.memory import Limits
from headrace.plan.options import KV_BYTES, DemandConfig, PlanConfig
from headrace.plan.report import Report, to_json, to_text
from headrace.plan.search import Layout, Question, enough_gpus, search
from headrace.plan.stored import differences, headers_of, measure, sized, used_bytes
from headrace.spec import ModelSpec
from headrace.weights.source import EMBEDDED_NAME, find_spec, read_spec, resolve

GPU_CHUNK, CPU_CHUNK = 8192, 512
"""Most tokens of a step that `headrace serve` takes by itself."""
GPU_RUN_AHEAD, CPU_RUN_AHEAD = 2, 0
"""Plans that it issues ahead. A step on a GPU is shorter than the trip of its result through the engine; on a CPU it is
many times longer."""
SMALL_SHARE = 0.5
"""Share of the memory that weights leave, under which a KV cache is small enough to say why."""


def plan(config: PlanConfig, look: Look) -> int:
    """Answer and print; `look` says what is in this machine. Raises UserError."""
    if config.history:
        return _history(config)
    if config.plot is not None:
        from headrace.plan.plot import check_plot

        check_plot(Path(config.plot))
    report = make_report(config, look, say=_say)
    layout = _named(report, config.explain)
    if config.plot is not None:
        from headrace.plan.plot import draw

        draw(report, Path(config.plot))
    if config.emit is not None:
        text = emit(config.emit, config.model or "", report.question, layout)
    elif config.json:
        text = to_json(report)
    else:
        text = to_text(report) if config.explain is None else explain(report, layout)
    sys.stdout.write(text + "\n")
    return 0


def make_report(config: PlanConfig, look: Look, *, say: Callable[[str], None]) -> Report:
    """Find the model and the machine, and judge every layout. Raises UserError."""
    name, spec = _model(config.model, say)
    headers = None if config.model is None else headers_of(config.model, say)
    sizes = None if headers is None else measure(headers, spec)
    said = [] if sizes is None else differences(spec, sizes)
    if sizes is not None:
        spec = sized(spec, sizes)
    demand, fixed = config.demand, config.fixed
    if demand.max_len is not None and demand.max_len > spec.max_positions:
        raise UserError(f"--max-len {demand.max_len}: the model has {spec.max_positions} positions")
    ranks = None
    if fixed.pp or fixed.tp or fixed.ep or fixed.split:
        ranks = (fixed.pp or len(fixed.split or (0,))) * (fixed.tp or fixed.ep or 1)
    machine = find_machine(config.hardware, ranks, look)
    question = ask(spec, demand, machine)
    layouts = search(question, machine, fixed)
    return Report(
        model=name,
        model_bytes=used_bytes(sizes)
        if sizes is not None
        else rank_bytes(spec, 1, range(spec.num_layers), first=True, last=True),
        question=question,
        machine=machine,
        layouts=layouts,
        notes=[*said, *_notes(question, machine, layouts)],
    )


def ask(spec: ModelSpec, demand: DemandConfig, machine: Machine) -> Question:
    """What layouts are judged by: the model in the type that it is served in, steps as `headrace serve` has them."""
    on_cpu = machine.gpus[0].is_cpu
    served = spec if spec.dtype == "float32" else replace(spec, dtype="float32" if on_cpu else "bfloat16")
    limits = Limits(
        chunk=demand.chunk or (CPU_CHUNK if on_cpu else GPU_CHUNK),
        max_running=max(demand.max_running, *demand.concurrency),
        run_ahead=CPU_RUN_AHEAD if on_cpu else GPU_RUN_AHEAD,
        graphs=not on_cpu and served.dtype == "bfloat16",
        on_cpu=on_cpu,
        kv_value_bytes=KV_BYTES.get(demand.kv_dtype),
        count_unused=demand.count_unused,
    )
    return Question(
        spec=served, demand=demand, limits=limits, routing=Uniform() if demand.routing == "uniform" else Skewed()
    )


def _model(model: str | None, say: Callable[[str], None]) -> tuple[str, ModelSpec]:
    if model is None:
        return EMBEDDED_NAME, read_spec(resolve(None, say=say))
    return find_spec(model, say=say)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _named(report: Report, name: str | None) -> Layout:
    """The layout of that name; the best for none."""
    if name is None or name == "best":
        return report.layouts[0]
    plain = name.replace("×", "").replace("x", "").lower()
    for layout in report.layouts:
        if layout.mesh.name == plain:
            return layout
    raise UserError(
        f"--explain {name}: no such layout here; there are {', '.join(one.mesh.name for one in report.layouts)}"
    )


def _notes(question: Question, machine: Machine, layouts: list[Layout]) -> list[str]:
    notes = list(question.spec.notes)
    if machine.gpus[0].is_cpu:
        notes.append("no GPU here: rough figures for this machine's cores; --gpu NAME plans for one that is elsewhere")
    best = layouts[0]
    if not best.fits:
        more = enough_gpus(question, machine)
        notes.append(
            f"{more[0]} such GPUs would do, as {more[1].mesh.name}"
            if more
            else "no number of such GPUs up to 64 would do"
        )
        return notes
    if best.mesh.num_ranks < len(machine.gpus):
        notes.append(
            f"{best.mesh.num_ranks} of the {len(machine.gpus)} GPUs are used: no layout divides the model over all"
        )
    worst = best.stages[best.worst]
    left = worst.gpu_bytes - worst.weight_bytes
    if worst.kv_bytes < left * SMALL_SHARE and not machine.gpus[0].is_cpu:
        notes.append(
            f"{best.mesh.name}: weights leave {left / 2**30:.1f} GiB on stage {best.worst} and the KV cache gets "
            f"{worst.kv_bytes / 2**30:.1f}: steps need {worst.steps_bytes / 2**30:.1f} "
            "(a smaller --chunk or --max-running takes less)"
        )
    target = question.demand.target
    if best.decode[target].num_running < target:
        notes.append(
            f"{best.mesh.name}: the KV cache holds {best.decode[target].num_running} requests of "
            f"{question.demand.input + question.demand.output} tokens at once (marked *)"
        )
    return notes


def _history(config: PlanConfig) -> int:
    starts = read_history()
    if config.json:
        rows = [msgspec.to_builtins(start) | {"errors": errors(start)} for start in starts]
        sys.stdout.write(msgspec.json.encode({"starts": rows}).decode() + "\n")
    else:
        sys.stdout.write(history_text(starts) + "\n")
    return 0
