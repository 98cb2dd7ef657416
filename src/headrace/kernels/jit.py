"""Triton where it is installed; elsewhere a stand-in, so that every kernel file imports and only a launch fails.

Programmatic dependent launch (PDL; sm_90 and later): a kernel launched with `launch_options` starts when all programs
of the one before it in the stream have come to `let_next_start` or ended, and waits for its end in `await_inputs`. Its
start is hidden, and weights may be on their way before the wait.

Triton makes another kernel for every alignment of a pointer, and for numbers that are one or multiples of 16. What
differs from step to step is kept out of that by name: else a request of an unlucky length would wait for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

STEP_SIZES = ("num_rows", "tokens", "num_splits", "least", "most_tokens", "parts", "chunks")
"""Names of kernels' numbers that differ from step to step."""
STEP_ARRAYS = (
    "row_slot", "row_start", "row_count", "row_offset", "kv_offset", "kv_len", "positions_ptr", "slots_ptr",
    "temperature_ptr", "top_p_ptr", "min_p_ptr",
)  # fmt: skip
"""Names of arrays that are slices of what a step brings along."""

try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = partial(
        triton.jit, do_not_specialize=STEP_SIZES, do_not_specialize_on_alignment=STEP_ARRAYS
    )
except ImportError:  # no build of it for this system: the references run

    class _Missing:
        """Accepts every mention, refuses every use."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("Triton is not installed: its kernels cannot run here")

        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("Triton is not installed: its kernels cannot run here")

    triton = tl = _Missing()

    def jit(kernel: Any) -> Any:
        """A kernel that cannot be launched."""
        return _Missing()


try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton, or none: every kernel starts when the one before it has ended
    gdc_launch_dependents = gdc_wait = None


@jit
def await_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the kernel before has ended and what it wrote is there.

    Every program of a kernel launched with PDL comes here, one that returns at once too: a kernel's end then means
    that all before it have ended, which those after it rely on. Until here nothing is written, and nothing is read but
    weights and tables, which no kernel of a step writes.
    """
    if PDL:
        gdc_wait()


@jit
def let_next_start(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Near a program's end: earlier, and what follows would hold multiprocessors that a second stream needs."""
    if PDL:
        gdc_launch_dependents()


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel that calls `await_inputs(PDL)` is launched with."""
    able = device.type == "cuda" and torch.version.hip is None and gdc_wait is not None
    if able and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def on_compile(report: Callable[[str], object]) -> None:
    """From now on `report` hears the name of each kernel that Triton makes, or reads from its cache."""

    def made(*, fn: Any, **_: Any) -> None:
        report(fn.name)

    triton.knobs.runtime.jit_post_compile_hook = made


__all__ = [
    "STEP_ARRAYS",
    "STEP_SIZES",
    "await_inputs",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "launch_options",
    "let_next_start",
    "on_compile",
    "tl",
    "triton",
]
