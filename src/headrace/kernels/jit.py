"""Triton where it is installed; elsewhere a stand-in, so that every kernel file imports and only a launch fails.

Programmatic dependent launch (PDL; sm_90 and later): a kernel launched with `launch_options` starts while the one
before it in the stream still runs, and waits for its end in `await_inputs`. What is left of a boundary between two
kernels is then hardly more than the wait, and weights may be on their way before it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
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
    """Let the next kernel start, then wait until the kernel before has ended and what it wrote is there.

    Every program of a kernel launched with PDL comes here, one that returns at once too: a kernel's end then means
    that all before it have ended, which those after it rely on. Until here nothing is written, and nothing is read but
    weights and tables, which no kernel of a step writes.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """What a kernel that calls `await_inputs(PDL)` is launched with. HEADRACE_EARLY=0 switches PDL off."""
    able = False and device.type == "cuda" and torch.version.hip is None and gdc_wait is not None
    if able and os.environ.get("HEADRACE_EARLY") != "0" and torch.cuda.get_device_capability(device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


__all__ = ["await_inputs", "gdc_launch_dependents", "gdc_wait", "jit", "launch_options", "tl", "triton"]
