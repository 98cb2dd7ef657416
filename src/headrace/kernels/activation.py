"""SwiGLU on fused gate and up outputs.

Shapes: gate_up [..., 2 * I], gate first -> [..., I]. In the Triton form the leading dims are M rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton
from headrace.kernels.norm import FLOATS

BLOCK = 1024
"""Columns a program."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 * I], gate first -> silu(gate) * up [..., I]."""
    if gate_up.is_cuda and gate_up.dtype in FLOATS:
        return silu_mul_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up_ptr, y_ptr, row_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    source = gate_up_ptr + row * row_stride + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=mask, other=0.0).to(tl.float32)
    let_next_start(PDL)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """The same in one launch, rounded once."""
    assert gate_up.shape[-1] % 2 == 0
    width = gate_up.shape[-1] // 2
    if gate_up.ndim != 2 or gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    rows = gate_up.numel() // (2 * width) if width else 0
    y = gate_up.new_empty(*gate_up.shape[:-1], width)
    if rows:
        stride = gate_up.stride(0) if gate_up.ndim == 2 else 2 * width
        block = min(BLOCK, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        warps = max(1, min(4, block // 256))
        _silu_mul_kernel[grid](gate_up, y, stride, width, BLOCK=block, num_warps=warps, **launch_options(y.device))
    return y
