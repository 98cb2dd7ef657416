"""The sum over each token's choices of weight times expert result, and the shared experts' result on top.

Shapes: T tokens, k choices a token, P = T * k pairs, D hidden.
"""

from __future__ import annotations

import torch

from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton

_BLOCK_D = 1024


def combine(
    y_PD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    held: range,
    shared_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, D] of y's dtype. Rows of choices that are not held here, and of pads (id -1), are never read."""
    if y_PD.is_cuda:
        return launch_combine(y_PD, weights_Tk, ids_Tk, held, shared_TD)
    return combine_reference(y_PD, weights_Tk, ids_Tk, held, shared_TD)


def combine_reference(
    y_PD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    held: range,
    shared_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in PyTorch, in float32 and choice by choice."""
    here = ((ids_Tk >= held.start) & (ids_Tk < held.stop)).unsqueeze(-1)
    y_TkD = torch.where(here, y_PD.unflatten(0, tuple(ids_Tk.shape)).float(), 0.0)
    out = torch.zeros_like(y_TkD[:, 0])
    for choice in range(ids_Tk.shape[1]):
        out += weights_Tk[:, choice, None].float() * y_TkD[:, choice]
    if shared_TD is not None:
        out += shared_TD.float()
    return out.to(y_PD.dtype)


@jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    y_ptr, weights_ptr, ids_ptr, shared_ptr, out_ptr, start, stop, D, K: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token and one run of columns a program."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = columns < D
    total = tl.zeros([BLOCK_D], tl.float32)
    for choice in tl.static_range(K):  # unrolled: all rows are on their way at once
        pair = token * K + choice
        expert = tl.load(ids_ptr + pair)
        here = (expert >= start) & (expert < stop)
        weight = tl.load(weights_ptr + pair)
        row = tl.load(y_ptr + pair * D + columns, mask=real & here, other=0.0).to(tl.float32)
        total += tl.where(here, weight, 0.0) * row
    if SHARED:
        total += tl.load(shared_ptr + token * D + columns, mask=real, other=0.0).to(tl.float32)
    let_next_start(PDL)
    tl.store(out_ptr + token * D + columns, total.to(out_ptr.dtype.element_ty), mask=real)


def launch_combine(
    y_PD: torch.Tensor,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    held: range,
    shared_TD: torch.Tensor | None,
    *,
    block: int = _BLOCK_D,
    num_warps: int = 4,
) -> torch.Tensor:
    """The Triton kernel."""
    num_tokens, top_k = ids_Tk.shape
    hidden = y_PD.shape[1]
    assert y_PD.shape[0] == num_tokens * top_k and y_PD.is_contiguous(), (y_PD.shape, ids_Tk.shape)
    assert weights_Tk.shape == ids_Tk.shape and weights_Tk.dtype == torch.float32, (weights_Tk.shape, weights_Tk.dtype)
    assert weights_Tk.is_contiguous() and ids_Tk.is_contiguous() and not ids_Tk.is_floating_point()
    out = torch.empty(num_tokens, hidden, dtype=y_PD.dtype, device=y_PD.device)
    if shared_TD is not None:
        assert shared_TD.shape == out.shape and shared_TD.is_contiguous(), (shared_TD.shape, shared_TD.stride())
    if num_tokens:
        _combine_kernel[(num_tokens, triton.cdiv(hidden, block))](
            y_PD,
            weights_Tk,
            ids_Tk,
            shared_TD,
            out,
            held.start,
            held.stop,
            hidden,
            K=top_k,
            SHARED=shared_TD is not None,
            BLOCK_D=block,
            num_warps=num_warps,
            **launch_options(out.device),
        )
    return out
