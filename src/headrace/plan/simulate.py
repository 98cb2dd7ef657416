"""`headrace simulate`: a layout's machine priced, requests served in virtual time, figures printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from headrace.errors import UserError
from headrace.mesh import Mesh, build_mesh
from headrace.plan.arrivals import Arrivals, Ask, Closed, Open, random_times, read_asks
from headrace.plan.config import MachineConfig, SimulateConfig, StepsConfig, WorkloadConfig
from headrace.plan.cost import Roofline
from headrace.plan.curve import cost_curve
from headrace.plan.experts import Routing, Skewed, Uniform
from headrace.plan.figures import Figures, Setup, figures, to_json, to_text
from headrace.plan.hardware import Machine, build_machine, catalogue
from headrace.plan.hardware_file import read_hardware
from headrace.plan.load import Load
from headrace.plan.memory import Limits, kv_layer_bytes, kv_tokens, weight_bytes
from headrace.plan.reads import decode_balance
from headrace.plan.split import Splitter
from headrace.plan.virtual import VirtualEngine
from headrace.schedule import SchedulerConfig
from headrace.spec import ModelSpec
from headrace.telemetry.perfetto import write_trace
from headrace.weights.source import find_spec

UNKNOWN_ROWS = 4
"""Rows of a microbatch at which stages are levelled where nothing says how many requests will be under way."""


def simulate(config: SimulateConfig) -> int:
    """Run and print."""
    setup, found = run_simulation(config)
    sys.stdout.write((to_json if config.json else to_text)(setup, found) + "\n")
    return 0


def run_simulation(config: SimulateConfig) -> tuple[Setup, Figures]:
    """Serve the workload in virtual time, and write the trace if one is asked for. Raises UserError."""
    name, spec = find_spec(config.model, say=_say)
    asks = _asks(config.workload)
    routing = Uniform() if config.workload.routing == "uniform" else Skewed()
    mesh = build_mesh(config.layout, spec)
    machine = machine_of(config.machine, mesh.num_ranks)
    if config.layout.split is None:
        mesh = _fastest(config, spec, mesh, machine, routing, asks)
    stage_tokens = _kv_tokens(config, spec, mesh, machine)
    engine = VirtualEngine(
        _scheduler_config(config, spec, mesh, min(stage_tokens), asks),
        Roofline(spec, mesh, machine, routing),
        balance=decode_balance(spec, mesh),
        record=config.trace is not None,
    )
    engine.run(_arrivals(config.workload, asks))
    if config.trace is not None:
        try:
            write_trace(Path(config.trace), engine.pipeline.spans, f"{name} {mesh.name} on {machine.gpus[0].slug}")
        except OSError as error:
            raise UserError(f"--trace {config.trace}: cannot be written: {error.strerror or error}") from None
    setup = Setup(
        model=name,
        layout=mesh.name,
        split=mesh.split,
        gpu=" and ".join(dict.fromkeys(gpu.slug for gpu in machine.gpus)),
        num_gpus=mesh.num_ranks,
        links=machine.link.slug if machine.link else "none",
        hosts=machine.num_hosts,
        network=machine.network.slug if machine.network else None,
        workload=_in_words(config.workload, asks),
        weight_bytes=[weight_bytes(spec, mesh, stage) for stage in range(mesh.pp)],
        stage_kv_tokens=stage_tokens,
    )
    return setup, figures(engine, closed=config.workload.kind == "closed")


def machine_of(config: MachineConfig, num_ranks: int) -> Machine:
    """What so many ranks run on, by name or as measured. Raises UserError."""
    if config.hardware is not None:
        measured = read_hardware(Path(config.hardware))
        return measured.machine(num_ranks, links=config.links, num_hosts=config.hosts, network=config.network)
    assert config.gpu is not None
    return build_machine(
        catalogue(), config.gpu, num_ranks, links=config.links, num_hosts=config.hosts, network=config.network
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _asks(workload: WorkloadConfig) -> list[Ask]:
    """All requests; those of a closed loop come when others end, and their times are not known."""
    if workload.kind == "file":
        assert workload.arrivals is not None
        return read_asks(Path(workload.arrivals), workload.input, workload.output)[: workload.requests]
    count = workload.num_requests
    times = [0.0] * count
    if workload.rate is not None:
        shape = 1.0 if workload.kind == "poisson" else workload.burstiness
        times = random_times(count, workload.rate, shape, workload.seed)
    return [Ask(at_s, workload.input, workload.output) for at_s in times]


def _arrivals(workload: WorkloadConfig, asks: list[Ask]) -> Arrivals:
    if workload.kind == "closed":
        return Closed(workload.num_clients, len(asks), workload.input, workload.output)
    return Open(asks)


def _under_way(config: SimulateConfig, mesh: Mesh, asks: list[Ask]) -> int:
    """How many requests decode at once, as far as that can be said."""
    known = {"closed": config.workload.num_clients, "burst": len(asks)}
    return min(known.get(config.workload.kind, UNKNOWN_ROWS * mesh.pp), len(asks), config.steps.max_running)


def _fastest(
    config: SimulateConfig, spec: ModelSpec, mesh: Mesh, machine: Machine, routing: Routing, asks: list[Ask]
) -> Mesh:
    """The mesh with the split that is fastest for the microbatches to come; the one by bytes where none fits."""
    under_way = _under_way(config, mesh, asks)
    length = max(ask.input + ask.output // 2 for ask in asks)
    load = Load.decode(-(-under_way // min(mesh.pp, under_way)), length)
    splitter = Splitter(spec, mesh, machine, routing)
    steps = config.steps
    for num_tokens in (under_way * max(ask.input + ask.output for ask in asks), 2):
        split = splitter.fastest(load, limits_of(steps), num_tokens)
        if split is not None:
            return replace(mesh, split=split)
    return mesh


def limits_of(steps: StepsConfig) -> Limits:
    """What the flags say of steps."""
    return Limits(chunk=steps.chunk, max_running=steps.max_running, run_ahead=steps.run_ahead)


def _kv_tokens(config: SimulateConfig, spec: ModelSpec, mesh: Mesh, machine: Machine) -> tuple[int, ...]:
    steps = config.steps
    if steps.kv_memory is None:
        return kv_tokens(spec, mesh, machine, limits_of(steps))
    stages = [sum(kv_layer_bytes(spec, mesh.tp, index) for index in mesh.layers_of(stage)) for stage in range(mesh.pp)]
    return tuple(steps.kv_memory // each for each in stages)


def _scheduler_config(
    config: SimulateConfig, spec: ModelSpec, mesh: Mesh, num_tokens: int, asks: list[Ask]
) -> SchedulerConfig:
    steps = config.steps
    longest = max(ask.input + ask.output for ask in asks)
    num_pages = num_tokens // steps.page_size
    if longest > num_pages * steps.page_size:
        raise UserError(f"--input and --output: {longest} tokens do not fit in the KV cache, which holds {num_tokens}")
    most = steps.max_running * -(-(longest + steps.page_size) // steps.page_size)
    return SchedulerConfig(
        num_stages=mesh.pp,
        max_running=steps.max_running,
        chunk=steps.chunk,
        page_size=steps.page_size,
        num_pages=min(num_pages, most),
        max_len=longest,
        run_ahead=steps.run_ahead,
        curve=cost_curve(spec, "cuda", steps.chunk),
    )


def _in_words(workload: WorkloadConfig, asks: list[Ask]) -> str:
    inputs, outputs = (
        sum(values) / len(asks) for values in zip(*((ask.input, ask.output) for ask in asks), strict=True)
    )
    how = {
        "burst": "at once",
        "closed": f"from {workload.num_clients} clients",
        "poisson": f"at {workload.rate or 0:g} a second (Poisson)",
        "gamma": f"at {workload.rate or 0:g} a second (gamma, shape {workload.burstiness:g})",
        "file": f"as {workload.arrivals} has them",
    }[workload.kind]
    return f"{len(asks)} requests {how}: {inputs:.0f} tokens in, {outputs:.0f} out; {workload.routing} routing"
