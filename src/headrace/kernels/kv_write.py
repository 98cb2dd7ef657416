"""Writing rows of keys and values, or of latents, into the pages of a layer's cache.

Shapes: T tokens, K KV heads, D head dim, C latent and rope dims, N pages, S page size. A slot is page * S + offset;
a negative one marks a token that is not kept.
"""

from __future__ import annotations

import torch

from headrace.kernels.jit import await_inputs, jit, launch_options, tl, triton
from headrace.kernels.norm import FLOATS


def write_rows(flat: torch.Tensor, slots_T: torch.Tensor, rows: torch.Tensor) -> None:
    """flat[slot] = row for every slot that is not negative: the reference of all that write."""
    if not flat.is_cuda:
        try:  # pads are what graphs have, so on a CPU to look for them first would cost more than they do
            flat.index_copy_(0, slots_T, rows)
            return
        except IndexError:
            pass  # a negative slot, or an error that comes again
    kept = slots_T >= 0
    flat.index_copy_(0, slots_T[kept], rows[kept])


def slot_stride(cache: torch.Tensor) -> int:
    """Elements from one slot of [N, S, ...] to the next, which is all that a kernel needs to know of a cache."""
    assert cache.stride(0) == cache.shape[1] * cache.stride(1), "pages must follow each other"
    assert cache[0, 0].is_contiguous()
    return cache.stride(1)


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache_NSKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Keep the step's keys and values. cache: [N, S, 2, K, D]."""
    if k_TKD.is_cuda and k_TKD.dtype in FLOATS:
        return write_rows_triton((k_TKD.flatten(1), v_TKD.flatten(1)), cache_NSKD, slots_T)
    flat = cache_NSKD.flatten(0, 1)
    write_rows(flat[:, 0], slots_T, k_TKD)
    write_rows(flat[:, 1], slots_T, v_TKD)
    return None


def write_latent(latent_TC: torch.Tensor, cache_NSC: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Keep the step's latent rows. cache: [N, S, C]."""
    if latent_TC.is_cuda and latent_TC.dtype in FLOATS:
        return write_rows_triton((latent_TC,), cache_NSC, slots_T)
    return write_rows(cache_NSC.flatten(0, 1), slots_T, latent_TC)


@jit
def _write_kernel(  # type: ignore[no-untyped-def]
    first_ptr, second_ptr, cache_ptr, slots_ptr, first_stride, second_stride, slot_stride, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token)
    if part == 0:
        row = tl.load(first_ptr + token * first_stride + column, mask=column < width)
    else:
        row = tl.load(second_ptr + token * second_stride + column, mask=column < width)
    target = cache_ptr + slot * slot_stride + part * width + column
    tl.store(target, row.to(cache_ptr.dtype.element_ty), mask=(column < width) & (slot >= 0))


def write_rows_triton(parts: tuple[torch.Tensor, ...], cache: torch.Tensor, slots_T: torch.Tensor) -> None:
    """One or two parts [T, W] behind each other into every token's slot, in one launch."""
    tokens, width = parts[0].shape
    assert len(parts) in (1, 2) and all(p.shape == (tokens, width) and p.stride(1) == 1 for p in parts)
    assert slots_T.shape == (tokens,) and slots_T.is_contiguous() and slots_T.dtype == torch.int64
    assert cache[0, 0].numel() == len(parts) * width
    if tokens:
        _write_kernel[(tokens, len(parts))](
            parts[0], parts[-1], cache, slots_T, parts[0].stride(0), parts[-1].stride(0), slot_stride(cache), width,
            BLOCK=triton.next_power_of_2(width), **launch_options(cache.device),
        )  # fmt: skip
