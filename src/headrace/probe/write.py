"""Findings as a hardware file: the entries of the planner's catalogue, measured, and beside them all that was found."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.errors import Fault
from headrace.plan.hardware import GIB, KIB, MIB, NCCL_BASE_S, Catalogue, Gpu, assumed_gpu, catalogue
from headrace.probe.findings import Device, Findings, Points

READ_SHARE = 0.93
"""Of a copy's rate, what weights are read at: INT4 experts on an H200 (catalogue.toml)."""
LINK = "here"
ALIKE = 0.05
"""GPUs of one name whose figures differ by no more are one entry."""
LEAST_HOP_S = 0.1e-6
Table = Mapping[str, Any]


def hardware_text(found: Findings) -> str:
    """The file's TOML: `[machine]` names entries that follow, `[probe]` is for people.

    Raises Fault where nothing that has a place in it was measured.
    """
    known = known_gpus(catalogue(), (device.name for device in found.devices))
    entries: dict[str, list[Device]] = {}
    gpus = []
    for device in found.devices:
        slug = _entry_of(device, known.get(device.name), entries)
        if slug:
            gpus.append(slug)
    if not gpus:
        raise Fault("; ".join(["nothing was measured that a plan could go by", *found.problems]))
    tables: dict[str, Table] = {"machine": {"gpus": gpus, "link": LINK}}
    tables["assumed"] = {"source": "headrace probe: every entry has its own"}
    for slug, devices in entries.items():
        tables[f"gpu.{slug}"] = _gpu(devices, known.get(devices[0].name))
    tables[f"link.{LINK}"] = _link(found)
    tables["network"] = {}
    tables["probe"] = {"problems": found.problems, "date": _now()}
    if found.disk_reads:
        reads = _rounded(found.disk_reads, KIB, 1e9)
        tables["probe.disk"] = {"path": found.disk_path, "past_cache": found.disk_direct, "kib_gb_s": reads}
    if found.nccl_sums:
        nccl = {str(size): _rounded(points, KIB, 1e-6) for size, points in found.nccl_sums.items()}
        tables["probe.nccl_all_reduce"] = nccl
    lists = {"probe.device": [_device(device) for device in found.devices], "probe.pair": _pairs(found)}
    return "\n".join(["# Measured by headrace probe.", *_toml(tables, lists)])


def known_gpus(known: Catalogue, names: Iterable[str]) -> dict[str, Gpu]:
    """The catalogue's entries of GPUs as their driver calls them; those that it does not have are left out."""
    found = {}
    for name in names:
        words = set(re.findall(r"[a-z0-9]+", name.lower()))
        # "NVIDIA H100 80GB HBM3" is the one in a socket, and a laptop's GPU has a desktop's name.
        words |= set() if "pcie" in words else {"sxm"}
        fits = [gpu for slug, gpu in known.gpus.items() if set(slug.split("-")) <= words]
        if fits and "laptop" not in words:
            found[name] = max(fits, key=lambda gpu: len(gpu.slug))
    return found


def _entry_of(device: Device, kind: Gpu | None, entries: dict[str, list[Device]]) -> str:
    """The slug of an entry that such a GPU is in, made if there is none; nothing where no figures are had for it."""
    if (device.bandwidth is None or not device.flops) and kind is None:
        return ""
    for slug, members in entries.items():
        if members[0].name == device.name and _alike(device, members[0]):
            members.append(device)
            return slug
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)|nvidia", " ", device.name.lower()))
    slug = kind.slug if kind else "-".join(words) or "unnamed"
    if slug in entries:
        slug += f"-gpu{device.gpu}"
    entries[slug] = [device]
    return slug


def _alike(one: Device, other: Device) -> bool:
    figures = ((one.bandwidth, other.bandwidth), (_flops(one), _flops(other)), (one.memory_bytes, other.memory_bytes))
    return all(
        (a is None) == (b is None) and (a is None or b is None or abs(a - b) <= ALIKE * max(a, b)) for a, b in figures
    )


def _flops(device: Device) -> float | None:
    """The faster type's: the engine computes in that."""
    return max(device.flops.values(), default=None)


def _gpu(devices: Sequence[Device], kind: Gpu | None) -> Table:
    """An entry: the slowest of those in it; what was not measured is as the catalogue has it."""
    one = devices[0]
    copies = [device.bandwidth for device in devices if device.bandwidth is not None]
    flops = [rate for rate in map(_flops, devices) if rate is not None]
    assert (copies and flops) or kind is not None
    base = kind or assumed_gpu()
    missing = [what for what, values in (("memory", copies), ("products", flops)) if not values]
    said = f"not measured, from the catalogue: {', '.join(missing)}. " if missing else ""
    return {
        "name": one.name,
        "memory_gib": _round(min(device.memory_bytes for device in devices) / GIB),
        "memory_gb_s": _round((min(copies) if copies else base.bandwidth) / 1e9),
        "cache_mib": _round(one.cache_bytes / MIB),
        "bf16_tflops": _round((min(flops) if flops else base.bf16_flops) / 1e12),
        "read_share": READ_SHARE if copies else base.read_share,
        "dense_share": 1.0 if flops else base.dense_share,
        "expert_share": _round(base.expert_share / (base.dense_share if flops else 1.0)),
        "attention_share": _round(base.attention_share / (base.dense_share if flops else 1.0)),
        "launch_us": _round(base.launch_s * 1e6),
        "link": LINK,
        "source": f"headrace probe: a copy and a product, as reached. {said}Other shares as elsewhere.",
    }


def _link(found: Findings) -> Table:
    bandwidth, latency_s, how = _transfer(found)
    smallest = {size: points[0][1] for size, points in found.sums.items()}
    hop_s = 1e-6
    if smallest:
        size = max(smallest)
        hop_s = max(LEAST_HOP_S, (smallest[size] - NCCL_BASE_S) / (2 * (size - 1)))
    curves = {f"all_reduce.{size}": _rounded(_rising(points), KIB, 1e-6) for size, points in found.sums.items()}
    return {
        "name": f"this machine: {how}",
        "gb_s": _round(bandwidth / 1e9),
        "latency_us": _round(latency_s * 1e6),
        "hop_us": _round(hop_s * 1e6),
        **curves,
        "source": f"headrace probe: {how}",
    }


def _transfer(found: Findings) -> tuple[float, float, str]:
    """Bandwidth, latency, and where they are from: the slowest pair, for a pipeline goes at the pace of that one."""
    if found.pairs:
        late = [pair.latency_s for pair in found.pairs if pair.latency_s is not None]
        how = "P2P" if all(pair.p2p for pair in found.pairs) else "some pairs through host memory"
        slowest = min(min(pair.there, pair.back) for pair in found.pairs)
        return slowest, statistics.median(late) if late else 1e-6, f"{how}, the slowest of {len(found.pairs)} pairs"
    if found.sums:
        size, points = min(found.sums.items())
        num_bytes, seconds = points[-1]
        moved = 2 * (size - 1) / size * num_bytes
        return moved / seconds, points[0][1] / 2, f"sums over {size} ranks"
    rates = [device.to_gpu for device in found.devices if device.to_gpu is not None]
    if rates:
        return min(rates), 14e-6, "host and GPU, whose latency is not measured"
    return 10e9, 30e-6, "assumed, for nothing could be measured"


def _rising(points: Points) -> Points:
    """More bytes never take less: a curve of times is what the model goes by."""
    risen, most = [], 0.0
    for size, seconds in points:
        most = max(most, seconds)
        risen.append((size, most))
    return risen


def _device(device: Device) -> Table:
    link = device.link
    fields = {
        "name": device.name,
        "gpu": device.gpu,
        "cores": device.cores or None,
        "copy_gb_s": device.bandwidth and _round(device.bandwidth / 1e9),
        "tflops": {name: _round(rate / 1e12) for name, rate in device.flops.items()} or None,
        "host_to_gpu_gb_s": device.to_gpu and _round(device.to_gpu / 1e9),
        "gpu_to_host_gb_s": device.from_gpu and _round(device.from_gpu / 1e9),
        "pcie": link and link.text,
        "pcie_most": link and f"PCIe {link.gen_max} x{link.width_max}",
    }
    return {name: value for name, value in fields.items() if value is not None}


def _pairs(found: Findings) -> list[Table]:
    rows: list[Table] = []
    for pair in found.pairs:
        row: dict[str, Any] = {"gpus": [pair.gpu, pair.peer], "p2p": pair.p2p}
        row |= {"gb_s": _round(pair.there / 1e9), "back_gb_s": _round(pair.back / 1e9)}
        rows.append(row | ({} if pair.latency_s is None else {"latency_us": _round(pair.latency_s * 1e6)}))
    return rows


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(points: Points, unit: float, per: float) -> list[list[float]]:
    return [[_round(size / unit), _round(value / per)] for size, value in points]


def _toml(tables: Mapping[str, Table], lists: Mapping[str, Sequence[Table]]) -> Iterable[str]:
    for name, table in tables.items():
        yield f"\n[{name}]"
        yield from _lines(table)
    for name, rows in lists.items():
        for row in rows:
            yield f"\n[[{name}]]"
            yield from _lines(row)
    yield ""


def _lines(table: Table) -> Iterable[str]:
    for key, value in table.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    # JSON writes text, numbers and truths as TOML reads them.
    return json.dumps(value, ensure_ascii=False)
