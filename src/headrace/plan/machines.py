"""The machine to plan for: GPUs by name, from a file, or those that are here."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.plan.hardware import Catalogue, Gpu, Link, Machine, catalogue, find_gpu, read_catalogue
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
        return _cut(read_machine(Path(config.hardware)), config, "--hardware")
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
    hosts = config.hosts or 1
    if len(gpus) % hosts:
        raise UserError(f"--hosts {hosts}: does not divide {len(gpus)} GPUs")
    if hosts == 1 and config.network is not None:
        raise UserError(f"--network {config.network}: is between hosts, and --hosts is 1")
    if config.links == "none":
        return Machine(gpus=gpus, link=None, num_hosts=hosts)
    network = known.network(config.network) if config.network is not None else None
    if hosts > 1 and network is None:
        raise UserError(f"--hosts {hosts}: needs a --network between them, one of {', '.join(known.networks)}")
    links = [known.link(config.links)] if config.links else [known.link(gpu.link) for gpu in gpus]
    # Unlike GPUs meet at the slower one's link.
    return Machine(gpus=gpus, link=min(links, key=lambda link: link.bandwidth), num_hosts=hosts, network=network)


def _cut(machine: Machine, config: HardwareConfig, flag: str) -> Machine:
    """The first --gpus of them."""
    count = config.gpus or len(machine.gpus)
    if count > len(machine.gpus):
        where = "this machine has" if flag == "--gpus" else f"{config.hardware} has"
        raise UserError(f"--gpus {count}: {where} {len(machine.gpus)}; --gpu says what more of them would be")
    if count % machine.num_hosts:
        raise UserError(f"--gpus {count}: does not divide among {machine.num_hosts} hosts")
    return replace(machine, gpus=machine.gpus[:count])


def read_machine(path: Path) -> Machine:
    """A machine from a file, TOML or JSON. Raises UserError naming --hardware.

    `machine.gpus` lists slugs, one a GPU, or pairs of a slug and a count; `machine.link`, `machine.hosts` and
    `machine.network` say how they are joined. Tables `gpu`, `link` and `network` may define or change entries as the
    catalogue has them; what an entry leaves out is the catalogue's.
    """
    tables = _read(path)
    try:
        own = {kind: tables.get(kind, {}) for kind in ("gpu", "link", "network")}
        known = read_catalogue(own)
        machine = tables["machine"]
        gpus = tuple(known.gpu(slug) for slug in _slugs(machine["gpus"]))
        config = HardwareConfig(
            links=machine.get("link"), hosts=machine.get("hosts", 1), network=machine.get("network")
        )
        if not gpus:
            raise UserError("machine.gpus is empty")
        return _joined(gpus, config, known)
    except UserError as error:
        raise UserError(f"--hardware {path}: {error}") from None
    except KeyError as error:
        raise UserError(f"--hardware {path}: {error.args[0]} is missing") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"--hardware {path}: not a machine's description: {error}") from None


def _slugs(gpus: Any) -> list[str]:
    if not isinstance(gpus, list):
        raise TypeError("machine.gpus is not a list")
    found: list[str] = []
    for entry in gpus:
        slug, count = (entry, 1) if isinstance(entry, str) else entry
        found += [slug] * count
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hardware {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        tables = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except ValueError as error:
        raise UserError(f"--hardware {path}: neither TOML nor JSON: {error}") from None
    assert isinstance(tables, dict)
    return tables
