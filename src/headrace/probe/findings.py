"""What was found of a machine, as far as it was: every figure may be missing, and then a problem says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.probe.link import PcieLink
from headrace.probe.task import Outcome

Points = Sequence[tuple[int, float]]
"""Pairs of bytes, and of seconds or bytes a second."""

BELIEVED: Mapping[str, tuple[float, float]] = {
    "bytes_per_s": (1e7, 1e14),
    "bfloat16": (1e7, 1e17),
    "float32": (1e7, 1e17),
    "to_gpu": (1e6, 1e13),
    "from_gpu": (1e6, 1e13),
    "there": (1e6, 1e13),
    "back": (1e6, 1e13),
    "latency_s": (1e-8, 1.0),
    "memory_bytes": (1e6, 1e14),
    "sums": (1e-7, 100.0),
    "nccl": (1e-7, 100.0),
    "reads": (1e4, 1e12),
}
"""Between which figures of any machine of these years are: others are an error of measuring, and are not written."""


@dataclass
class Device:
    """A GPU, or the processor with its memory."""

    gpu: int | None
    name: str
    memory_bytes: int
    cache_bytes: int
    cores: int = 0
    bandwidth: float | None = None
    """Bytes a second that a copy reads and writes."""
    flops: dict[str, float] = field(default_factory=dict)
    """Operations a second by type."""
    to_gpu: float | None = None
    from_gpu: float | None = None
    link: PcieLink | None = None
    """Under load."""

    @property
    def title(self) -> str:
        """In messages."""
        return self.name if self.gpu is None else f"GPU {self.gpu} ({self.name})"


@dataclass(frozen=True)
class Pair:
    """Two GPUs."""

    gpu: int
    peer: int
    p2p: bool
    there: float
    back: float
    latency_s: float | None


@dataclass
class Findings:
    """Of the whole machine."""

    devices: list[Device] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    sums: dict[int, Points] = field(default_factory=dict)
    """Seconds by bytes, by number of ranks, as the engine sums."""
    nccl_sums: dict[int, Points] = field(default_factory=dict)
    """The same by NCCL alone, where the engine has something faster for small ones."""
    disk_path: str = ""
    disk_reads: Points = ()
    disk_direct: bool = True
    problems: list[str] = field(default_factory=list)
    """In plain words, each a line."""

    @property
    def on_gpus(self) -> bool:
        """Whether these are figures of GPUs."""
        return any(device.gpu is not None for device in self.devices)


def believed(outcome: Outcome) -> Outcome:
    """The outcome as it is, or a problem instead of it where a figure cannot be."""
    for name, (least, most) in BELIEVED.items():
        for value in _figures((outcome.fields or {}).get(name)):
            if not (math.isfinite(value) and least <= value <= most):
                return Outcome(outcome.task, None, f"measured {name} {value:g}, which cannot be; left out")
    return outcome


def _figures(value: Any) -> list[float]:
    if value is None:
        return []
    return [float(second) for _, second in value] if isinstance(value, list | tuple) else [float(value)]
