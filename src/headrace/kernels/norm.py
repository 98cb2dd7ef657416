"""RMS normalisation, with the residual sum that precedes it.

Shapes: x [..., D], weight [D]. In the Triton form x is M outer times H inner rows of D.
"""

from __future__ import annotations

import torch

from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What the Triton form takes; wider types are left to the reference."""
NARROW = 2048
"""Values of narrow rows that one program holds."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dim, in float32 inside."""
    if x.is_cuda and x.dtype in FLOATS:
        return rms_norm_triton(x, None, weight, eps)[0]
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + delta, x + delta); delta None is zero."""
    if delta is None:
        return rms_norm(x, weight, eps), x
    if x.is_cuda and x.dtype in FLOATS:
        return rms_norm_triton(x, delta, weight, eps)
    total = x + delta
    return rms_norm(total, weight, eps), total


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, delta_ptr, weight_ptr, norm_ptr, total_ptr, num_rows, inner, x_outer, x_inner, dim, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < dim)[None, :]
    start = (row // inner).to(tl.int64) * x_outer + (row % inner) * x_inner
    packed = row.to(tl.int64)[:, None] * dim + column[None, :]
    # Every load is issued before the first use: a decode step waits for each of them only once.
    weight = tl.load(weight_ptr + column, mask=column < dim, other=0.0)
    await_inputs(PDL)
    x = tl.load(x_ptr + start[:, None] + column[None, :], mask=mask, other=0.0)
    if ADD:
        delta = tl.load(delta_ptr + packed, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + packed, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / dim + eps)
    let_next_start(PDL)
    norm = wide * scale[:, None] * weight.to(tl.float32)[None, :]
    tl.store(norm_ptr + packed, norm.to(norm_ptr.dtype.element_ty), mask=mask)


def norm_tiles(num_rows: int, dim: int) -> tuple[int, int, int]:
    """(rows a program, block, warps): one wide row, or several narrow ones; never so many that multiprocessors idle."""
    block = triton.next_power_of_2(dim)
    rows = max(1, min(NARROW // block, triton.next_power_of_2(num_rows) // 256))
    return rows, block, min(16, max(1, rows * block // 512))


def rms_norm_triton(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x + delta, x + delta) in one launch; the sum is rounded to x's type first. x may have strides."""
    dim = x.shape[-1]
    assert weight.shape == (dim,) and weight.is_contiguous() and weight.device == x.device
    if delta is not None:
        assert delta.shape == x.shape and delta.dtype == x.dtype
        x, delta = x.contiguous(), delta.contiguous()
    if x.is_contiguous() or x.ndim > 3 or x.stride(-1) != 1:
        x = x.contiguous()
        num_rows, inner, strides = x.numel() // dim, 1, (dim, 0)
    elif x.ndim == 3:
        num_rows, inner, strides = x.shape[0] * x.shape[1], x.shape[1], (x.stride(0), x.stride(1))
    else:
        num_rows, inner, strides = x.numel() // dim, 1, (x.stride(0) if x.ndim == 2 else 0, 0)
    norm = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(norm)
    if num_rows:
        rows, block, warps = norm_tiles(num_rows, dim)
        _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, delta, weight, norm, total, num_rows, inner, *strides, dim, eps,
            ADD=delta is not None, ROWS=rows, BLOCK=block, num_warps=warps, **launch_options(x.device),
        )  # fmt: skip
    return norm, total
