"""Figures and problems in plain words: what is wrong, what is likely behind it, what helps."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.plan.hardware import Gpu
from headrace.probe.findings import Device, Findings, Pair
from headrace.probe.link import PcieLink
from headrace.probe.task import Subject

SLOW_SHARE = 0.6
"""Of what such a GPU reaches elsewhere, or of what other pairs reach: below, something is wrong with this one."""
WITHOUT_P2P = "NCCL_P2P_DISABLE=1 does without P2P until then"
_IOMMUS = Path("/sys/class/iommu")
_CMDLINE = Path("/proc/cmdline")


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g}" if value < 1e12 else f"{value / 1e9:.0f}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}" if seconds >= 1e-4 else f"{seconds * 1e6:.3g}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _device(fields: Mapping[str, Any]) -> str:
    return f"{fields['name']}, {fields['memory_bytes'] / 2**30:.1f} GiB"


def _product(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value / 1e12:.3g} TFLOPS" for name, value in fields.items())


def _host(fields: Mapping[str, Any]) -> str:
    link = f", {PcieLink(**fields['link']).text}" if fields["link"] else ""
    return f"to it {_gb(fields['to_gpu'])} GB/s, from it {_gb(fields['from_gpu'])} GB/s{link}"


def _peer(fields: Mapping[str, Any]) -> str:
    late = f", {fields['latency_s'] * 1e6:.1f} us" if fields["latency_s"] else ""
    way = "P2P" if fields["p2p"] else "no P2P"
    return f"{way}, there {_gb(fields['there'])} GB/s, back {_gb(fields['back'])} GB/s{late}"


def _sums(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{_size(size)} {_us(seconds)} us" for size, seconds in fields["sums"])


def _disk(fields: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{_size(size)} {_gb(rate)} GB/s" for size, rate in fields["reads"])
    return f"{fields['filesystem']}, by reads of {rates}"


IN_WORDS: Mapping[Subject, Callable[[Mapping[str, Any]], str]] = {
    "device": _device,
    "memory": lambda fields: f"{_gb(fields['bytes_per_s'])} GB/s",
    "product": _product,
    "host": _host,
    "peer": _peer,
    "sums": _sums,
    "disk": _disk,
}
"""What was measured, by subject."""


def broken_p2p(gpu: int, peer: int, problem: str) -> str:
    """A pair whose copies hang, crash or arrive wrong: what happened, the likely cause, what helps."""
    return (
        f"P2P between GPU {gpu} and GPU {peer}: {problem}; likely an IOMMU or PCIe ACS stands in its way ({iommu()}):"
        f" switch both off in the BIOS (VT-d or AMD-Vi, ACS) or start the kernel with iommu=pt; {WITHOUT_P2P}"
    )


def iommu(iommus: Path = _IOMMUS, cmdline: Path = _CMDLINE) -> str:
    """What this machine says of its IOMMU."""
    try:
        names = sorted(entry.name for entry in iommus.iterdir())
        options = cmdline.read_text().split()
    except OSError:
        names, options = [], []
    if not names:
        return "the system shows no IOMMU, a host above it may have one"
    if "iommu=pt" in options:
        return f"{names[0]} is on, passing through"
    return f"{names[0]} is on"


def wrong_with(findings: Findings, known: Mapping[str, Gpu], reasons: Mapping[tuple[int, int], str]) -> list[str]:
    """What the figures themselves show. `known`: catalogue entries by device name; `reasons` by pair, the driver's."""
    found = []
    for device in findings.devices:
        if device.link is not None and device.link.below:
            most = f"PCIe {device.link.gen_max} x{device.link.width_max}"
            found.append(
                f"{device.title}: its link runs at {device.link.text} under load, GPU and slot can do {most}:"
                " reseat it, look at its riser and cable, and at the BIOS's link speed and bifurcation"
            )
        if device.name in known:
            found += _slow(device, known[device.name])
    return found + _without_p2p(findings.pairs, reasons) + _slow_pairs(findings.pairs)


def _slow(device: Device, kind: Gpu) -> list[str]:
    checks = (
        ("its memory is copied at", device.bandwidth, kind.bandwidth, "GB/s", 1e9),
        ("bf16 products run at", device.flops.get("bfloat16"), kind.flops_rate("dense"), "TFLOPS", 1e12),
    )
    return [
        f"{device.title}: {what} {value / unit:.0f} {name}, {value / usual:.0%} of the usual {usual / unit:.0f}:"
        " does something else run on it, is it hot, is its power limited?"
        for what, value, usual, name, unit in checks
        if value is not None and value < SLOW_SHARE * usual
    ]


def _without_p2p(pairs: Sequence[Pair], reasons: Mapping[tuple[int, int], str]) -> list[str]:
    without = [pair for pair in pairs if not pair.p2p]
    if not without:
        return []
    why = reasons.get((without[0].gpu, without[0].peer), "")
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        why = "NCCL_P2P_DISABLE is set"
    names = ", ".join(f"{pair.gpu} and {pair.peer}" for pair in without[:4]) + (", ..." if len(without) > 4 else "")
    which = "any two GPUs" if len(without) == len(pairs) > 1 else f"GPUs {names}"
    return [f"P2P is off between {which}{f' ({why})' if why else ''}: what they exchange goes through host memory"]


def _slow_pairs(pairs: Sequence[Pair]) -> list[str]:
    found = []
    usual = statistics.median([min(pair.there, pair.back) for pair in pairs]) if pairs else 0.0
    for pair in pairs:
        for source, dest, rate in ((pair.gpu, pair.peer, pair.there), (pair.peer, pair.gpu, pair.back)):
            if rate < SLOW_SHARE * max(usual, pair.there, pair.back):
                other = max(usual, pair.there, pair.back)
                found.append(
                    f"GPU {source} to GPU {dest}: {_gb(rate)} GB/s where {_gb(other)} is usual here; look at both links"
                )
    return found
