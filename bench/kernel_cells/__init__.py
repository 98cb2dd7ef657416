"""Cells of kernel measurements: each module here has `cells()`, which yields what to time and its floor.

A cell is measured by `bench/gpu.py kernels` (or `python -m bench.kernel_cells NAME [FILTER]`) with CUDA events over
graph replays, inputs rotating so that no cache helps; its result is appended to a JSON file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """One operation at one shape, in one variant."""

    kernel: str
    """Which kernel: "int4_gate_up"."""
    shape: dict[str, int | str]
    """What a row of the table is keyed by: {"tokens": 4}."""
    calls: list[Callable[[], object]]
    """The same work on different inputs (weights and activations), together several times the L2 cache; run in turn."""
    bytes: float = 0.0
    """Fewest bytes that one call must move: floor = bytes / copy bandwidth."""
    flops: float = 0.0
    """Operations that one call must do: floor = flops / bf16 product rate; the larger floor counts."""
    variant: str = ""
    """Which of several candidate forms; "" is the one that is shipped."""
    check: Callable[[], float] | None = None
    """Relative error against a float64 reference; run once before timing."""
    tags: dict[str, str] = field(default_factory=dict)
