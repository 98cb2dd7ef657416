"""The plan before a start: what cannot fit is refused, `--layout auto` is chosen, and what was predicted is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from headrace.config import EngineConfig, LayoutConfig
from headrace.errors import UserError
from headrace.mesh import Mesh
from headrace.plan.cost import Roofline
from headrace.plan.experts import Uniform
from headrace.plan.hardware import GIB, Machine, catalogue
from headrace.plan.history import Figures, Start, errors, keep
from headrace.plan.load import Load
from headrace.plan.machines import Here, machine_of, processors
from headrace.plan.memory import Limits, StageMemory, stage_memory
from headrace.plan.options import DemandConfig, FixedConfig
from headrace.plan.pace import first_token_s
from headrace.plan.search import Question, enough_gpus, judge, search
from headrace.spec import ModelSpec
from headrace.supervise.devices import ranks_per_gpu

CONCURRENCY = (1, 8, 32, 128)
INPUT, OUTPUT = 1000, 500
"""What an automatic layout is chosen for: a prompt and its answer, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a start is predicted to take."""

    question: Question
    mesh: Mesh
    machine: Machine
    device: Literal["cpu", "cuda"]
    stages: tuple[StageMemory, ...]
    is_timed: bool
    """Whether the GPUs are known, so that times can be predicted."""

    def predicted(self, prompt_tokens: int) -> Figures:
        """For a warm-up of so many tokens, and one decode."""
        weights, tokens = [stage.weight_bytes for stage in self.stages], [stage.kv_tokens for stage in self.stages]
        if not self.is_timed:
            return Figures(weights, tokens)
        cost = Roofline(self.question.spec, self.mesh, self.machine, self.question.routing)
        load = Load.decode(1, prompt_tokens + 1)
        edges, delays = cost.edges_s(1)
        trip = float(cost.steps_s(load).sum() + edges.sum() + delays.sum()) + cost.feedback_s
        if self.question.limits.run_ahead == 0:
            trip += cost.host_s
        return Figures(weights, tokens, first_token_s(cost, prompt_tokens, self.question.limits.chunk), trip)


def choose(spec: ModelSpec, engine: EngineConfig, device: Literal["cpu", "cuda"], here: Here) -> LayoutConfig:
    """The layout that the plan puts first, for decode. Raises UserError where none fits."""
    machine = processors(here, 1) if device == "cpu" else machine_of(here)
    question = _question(spec, engine, device)
    best = search(question, machine, FixedConfig())[0]
    if not best.fits and device == "cuda":
        raise UserError(f"--layout auto: no layout fits: {_shortest(best.stages)}{_more(question, machine)}")
    mesh = best.mesh
    return LayoutConfig(pp=mesh.pp, tp=mesh.tp, ep=mesh.ep, split=mesh.split)


def foresee(
    spec: ModelSpec, mesh: Mesh, engine: EngineConfig, device: Literal["cpu", "cuda"], here: Here
) -> Forecast | None:
    """Price what was asked for; None where the driver does not say what GPUs there are.

    Raises UserError for what cannot fit, whatever the libraries take, and says what would.
    """
    if device == "cuda" and not here.gpus:
        return None
    machine = processors(here, mesh.num_ranks) if device == "cpu" else machine_of(here, lenient=True)
    question = _question(spec, engine, device)
    ranks = _ranks(machine, mesh, device)
    stages = tuple(stage_memory(question.spec, mesh, ranks, stage, question.limits) for stage in range(mesh.pp))
    if device == "cpu":
        _check_host(mesh, stages, here)
    else:
        _check_gpus(question, mesh, machine, stages, engine)
    is_timed = _is_known(ranks)
    return Forecast(question=question, mesh=mesh, machine=ranks, device=device, stages=stages, is_timed=is_timed)


def split_for(spec: ModelSpec, mesh: Mesh, engine: EngineConfig, here: Here) -> tuple[int, ...]:
    """The split that the plan gives this layout on GPUs; the mesh's own where they are not known, or too few."""
    if not here.gpus or mesh.pp == 1:
        return mesh.split
    machine = machine_of(here, lenient=True)
    if not _is_known(machine) or mesh.num_ranks > len(machine.gpus):
        return mesh.split
    layout = judge(_question(spec, engine, "cuda"), mesh, machine)
    return layout.mesh.split if layout.fits else mesh.split


def _is_known(machine: Machine) -> bool:
    return all(gpu.is_cpu or gpu.slug in catalogue().gpus for gpu in machine.gpus)


def compare(forecast: Forecast, model: str, fields: Mapping[str, Any]) -> tuple[Start, str]:
    """What was predicted beside what came, as a record and as a line; `fields` are those of the engine's `Ready`."""
    warm = fields.get("warm") or {}
    stages = fields.get("stages", ())
    prompt_tokens = int(warm.get("prompt_tokens", 0))
    on_gpu = forecast.device == "cuda"
    measured = Figures(
        [float(stage["weight_bytes"]) for stage in stages],
        [int(stage.get("kv_tokens", 0)) for stage in stages] if on_gpu else [],
        float(warm.get("prompt_s", 0.0)),
        float(warm.get("decode_s", 0.0)),
    )
    predicted = forecast.predicted(max(1, prompt_tokens))
    start = Start(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model,
        layout=forecast.mesh.name,
        split=list(forecast.mesh.split),
        device=forecast.device,
        prompt_tokens=prompt_tokens,
        predicted=predicted,
        measured=measured,
    )
    return start, _line(start)


def remember(start: Start) -> None:
    """Keep it for `headrace plan --history`; a folder that cannot be written to is no reason to fail."""
    with contextlib.suppress(OSError):
        keep(start)


def _line(start: Start) -> str:
    ours, theirs = start.predicted, start.measured
    parts = []
    if theirs.weight_bytes:
        most = max(range(len(theirs.weight_bytes)), key=theirs.weight_bytes.__getitem__)
        parts.append(f"weights {ours.weight_bytes[most] / GIB:.2f} GiB, {theirs.weight_bytes[most] / GIB:.2f}")
    if theirs.kv_tokens and ours.kv_tokens:
        parts.append(f"room for {min(ours.kv_tokens):,} KV tokens, {min(theirs.kv_tokens):,}")
    if ours.prompt_s and theirs.prompt_s:
        parts.append(
            f"prompt of {start.prompt_tokens} tokens {1e3 * ours.prompt_s:.0f} ms, {1e3 * theirs.prompt_s:.0f}"
        )
    if ours.decode_s and theirs.decode_s:
        parts.append(f"decode step {1e3 * ours.decode_s:.1f} ms, {1e3 * theirs.decode_s:.1f}")
    off = errors(start)
    worst = f"; worst {max(off.values(), key=abs):+.0%}" if off else ""
    return f"  predicted, measured: {'; '.join(parts)}{worst}"


def _question(spec: ModelSpec, engine: EngineConfig, device: Literal["cpu", "cuda"]) -> Question:
    model, schedule = engine.model, engine.schedule
    assert model.dtype != "auto" and schedule.chunk is not None and schedule.run_ahead is not None
    longest = min(model.max_len or spec.max_positions, INPUT + OUTPUT)
    prompt = max(1, longest * INPUT // (INPUT + OUTPUT))
    demand = DemandConfig(
        concurrency=tuple(count for count in CONCURRENCY if count <= schedule.max_running),
        input=prompt,
        output=max(1, longest - prompt),
        max_len=model.max_len,
    )
    limits = Limits(
        chunk=schedule.chunk,
        max_running=schedule.max_running,
        run_ahead=schedule.run_ahead,
        graphs=model.graphs and model.attention == "triton" and model.dtype == "bfloat16",
        on_cpu=device == "cpu",
    )
    return Question(spec=replace(spec, dtype=model.dtype), demand=demand, limits=limits, routing=Uniform())


def _ranks(machine: Machine, mesh: Mesh, device: Literal["cpu", "cuda"]) -> Machine:
    """A GPU, or a part of one, for each rank."""
    if device == "cpu" or mesh.num_ranks <= len(machine.gpus):
        return replace(machine, gpus=machine.gpus[: mesh.num_ranks])
    each = ranks_per_gpu(mesh.num_ranks, len(machine.gpus))
    gpus = tuple(replace(gpu, memory_bytes=gpu.memory_bytes // each) for gpu in machine.gpus)
    return replace(machine, gpus=(gpus * each)[: mesh.num_ranks])


def _check_host(mesh: Mesh, stages: tuple[StageMemory, ...], here: Here) -> None:
    needed = mesh.tp * sum(stage.weight_bytes for stage in stages)
    if needed > here.memory_bytes:
        raise UserError(
            f"MODEL: {needed / GIB:.1f} GiB of weights do not fit in this host's {here.memory_bytes / GIB:.1f} GiB"
        )


def _check_gpus(
    question: Question, mesh: Mesh, machine: Machine, stages: tuple[StageMemory, ...], engine: EngineConfig
) -> None:
    asked, page = engine.schedule.kv_memory, engine.schedule.page_size
    for index, stage in enumerate(stages):
        cache = asked or page * stage.kv_token_bytes
        if stage.least_bytes + cache <= stage.gpu_bytes:
            continue
        kept = f" and {asked / GIB:.1f} of --kv-memory" if asked else ""
        best = search(question, machine, FixedConfig())[0]
        would = f"; {best.mesh.name} would fit (--layout auto)" if best.fits else _more(question, machine)
        raise UserError(
            f"{mesh.name} cannot fit: stage {index} needs {stage.weight_bytes / GIB:.1f} GiB of weights, "
            f"{(stage.least_bytes - stage.weight_bytes) / GIB:.1f} beside them{kept} on each GPU, which has "
            f"{stage.gpu_bytes / GIB:.1f}{would}"
        )


def _shortest(stages: Any) -> str:
    worst = min(stages, key=lambda stage: stage.kv_bytes)
    return (
        f"{worst.weight_bytes / GIB:.1f} GiB of weights and {(worst.steps_bytes + worst.spare) / GIB:.1f} beside them "
        f"on GPUs of {worst.gpu_bytes / GIB:.1f}"
    )


def _more(question: Question, machine: Machine) -> str:
    more = enough_gpus(question, machine)
    return f"; {more[0]} such GPUs would do, as {more[1].mesh.name}" if more else ""
