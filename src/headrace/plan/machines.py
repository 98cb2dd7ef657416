"""The machine to plan for: GPUs by name, from a file, or those that are here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import UserError
from headrace.plan.hardware import Catalogue, Gpu, Link, Machine, catalogue, find_gpu, join
from headrace.plan.hardware_file import read_hardware
from headrace.plan.options import HardwareConfig


@dataclass(frozen=True, kw_only=True)
class Here:
    """What is in this machine."""

    gpus: Sequence[tuple[str, int]] = ()
    """Name and memory in bytes of each GPU."""
    cores: int = 1
    memory_bytes: int = 0
    """Of the host."""


Look = Callable[[], Here]

CORE_BANDWIDTH = 9e9
"""Bytes a second that one core reads: measured on an AMD EPYC core (AVX2)."""
CORE_FLOPS = 50e9
"""Operations a second of one such core in float32."""


def find_machine(config: HardwareConfig, num_ranks: int | None, look: Look) -> Machine:
    """The machine with all of its GPUs. num_ranks: how many are asked for by the layout. Raises UserError."""
    if config.hardware is not None:
        return _cut(read_hardware(Path(config.hardware)).whole(), config, "--hardware")
    if config.gpu is not None:
        kind = catalogue().gpu(config.gpu)
        return _joined((kind,) * (config.gpus or num_ranks or config.hosts or 1), config, catalogue())
    here = look()
    if not here.gpus:
        return processors(here, config.gpus or num_ranks or 1)
    kinds = tuple(_kind(name, memory) for name, memory in here.gpus)
    return _cut(_joined(kinds, config, catalogue()), config, "--gpus")


def machine_of(here: Here, *, lenient: bool = False) -> Machine:
    """All GPUs of this host. lenient: what the catalogue does not know has its memory, and rates that mean nothing."""
    kinds = tuple(_unknown(name, memory) if lenient else _kind(name, memory) for name, memory in here.gpus)
    return _joined(kinds, HardwareConfig(), catalogue())


def processors(here: Here, num_ranks: int) -> Machine:
    """Ranks on the cores of this host, its memory and cores divided among them."""
    cores = max(1, here.cores // num_ranks)
    kind = Gpu(
        slug="cpu",
        name=f"{cores} cores",
        memory_bytes=here.memory_bytes // num_ranks,
        bandwidth=CORE_BANDWIDTH * cores,
        bf16_flops=CORE_FLOPS * cores,
        launch_s=5e-6,
        is_cpu=True,
        source="Rough: what one core of an AMD EPYC with AVX2 did.",
    )
    link = Link(slug="host-memory", name="Host memory", bandwidth=2e9, latency_s=130e-6, hop_s=60e-6, p2p=False)
    return Machine(gpus=(kind,) * num_ranks, link=link)


def _unknown(name: str, memory_bytes: int) -> Gpu:
    if find_gpu(catalogue(), name) is not None:
        return _kind(name, memory_bytes)
    return Gpu(slug=name, name=name, memory_bytes=memory_bytes, bandwidth=1e12, bf16_flops=1e14, link="pcie4-x16-host")


def _kind(name: str, memory_bytes: int) -> Gpu:
    """The catalogue's GPU of that name, with the memory that it has."""
    known = find_gpu(catalogue(), name)
    if known is None:
        raise UserError(
            f"{name}: this machine's GPU is not in the catalogue; describe it in a file for --hardware, "
            "or name one like it with --gpu"
        )
    return replace(known, memory_bytes=memory_bytes)


def _joined(gpus: tuple[Gpu, ...], config: HardwareConfig, known: Catalogue) -> Machine:
    return join(gpus, known, config.links, config.hosts or 1, config.network)


def _cut(machine: Machine, config: HardwareConfig, flag: str) -> Machine:
    """The first --gpus of them."""
    count = config.gpus or len(machine.gpus)
    if count > len(machine.gpus):
        where = "this machine has" if flag == "--gpus" else f"{config.hardware} has"
        raise UserError(f"--gpus {count}: {where} {len(machine.gpus)}; --gpu says what more of them would be")
    if count % machine.num_hosts:
        raise UserError(f"--gpus {count}: does not divide among {machine.num_hosts} hosts")
    return replace(machine, gpus=machine.gpus[:count])
