"""Latent attention for sm_90: one block a multiprocessor, every page read once for 64 heads, products by wgmma.

The portable kernel computes the scores twice (once in each group of four warps) and asks for the next page only after
it has used this one. Here the two groups share the scores' columns, and the next tile is under way during a whole step.
Shapes: M (position, head) pairs of a tile, N context positions of a tile, V value dims, R rope dims.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from headrace.kernels.device import limits
from headrace.kernels.jit import STEP_ARRAYS, STEP_SIZES, gdc_launch_dependents, gdc_wait

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )

    jit: Any = partial(gluon.jit, do_not_specialize=STEP_SIZES, do_not_specialize_on_alignment=STEP_ARRAYS)
    AVAILABLE = True
except ImportError:  # an older Triton, or none: the portable kernel runs
    from headrace.kernels.jit import jit
    from headrace.kernels.jit import tl as gl

    async_copy = fence_async_shared = warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = None
    AVAILABLE = False

BLOCK_M = 64
BLOCK_N = 64
NUM_WARPS = 8


def supports(device: torch.device, dtype: torch.dtype, dim: int, value_dim: int) -> bool:
    """Whether `latent_sm90` takes these queries: the published shape, on the architecture it is written for."""
    if not (AVAILABLE and device.type == "cuda" and dtype == torch.bfloat16 and (dim, value_dim) == (576, 512)):
        return False
    return limits(device).capability[0] == 9


@jit
def _await_inputs(PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    """As `jit.await_inputs`, whose form this language does not take."""
    if PDL:
        gdc_wait()


@jit
def _let_next_start(PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    """As `jit.let_next_start`."""
    if PDL:
        gdc_launch_dependents()


@jit
def _copy(kv_v, kv_r, buffer, base, v, r, inside):  # type: ignore[no-untyped-def]
    """Start copying one tile of latent rows; positions outside become zeros.

    The barrier: products read a tile after they are issued, so that only a wait in every warp says it is free.
    """
    gl.thread_barrier()
    async_copy.async_copy_global_to_shared(kv_v.index(buffer), base + v, mask=inside)
    async_copy.async_copy_global_to_shared(kv_r.index(buffer), base + r, mask=inside)
    async_copy.commit_group()


@jit
def _fold(s, top):  # type: ignore[no-untyped-def]
    """One tile of base-2 scores: (weights, what earlier sums keep, new maximum)."""
    new = gl.maximum(top, gl.max(s, 1))
    safe = gl.where(new == -float("inf"), 0.0, new)
    return gl.exp2(s - safe[:, None]), gl.exp2(top - safe), new


@jit
def _context(  # type: ignore[no-untyped-def]
    start, count, tile, split, num_splits, least,
    H: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """[lo, hi) of the positions that a tile attends to in its part of the context, and how long a part is."""
    part = start + count
    if SPLIT:
        part = gl.maximum(gl.cdiv(gl.cdiv(part, num_splits), BLOCK_N) * BLOCK_N, least)
    lo = split * part
    hi = gl.minimum(start + gl.minimum(count, (tile * BLOCK_M + BLOCK_M - 1) // H + 1), lo + part)
    return lo, hi, part


@jit
def _attend(  # type: ignore[no-untyped-def]
    q_V, q_R, kv_V, kv_R, p_MN, cache, table, page, lo, hi, end, n, v, r, scale_log2,
    V: gl.constexpr, C: gl.constexpr, S: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """The tiles of [lo, hi), the first of which is on its way: (sum of weighted values, mass, maximum)."""
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))[None, :]
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    mass = nothing  # summed over columns at the end
    top = gl.full([BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(1, SCORES))
    acc = warpgroup_mma_init(gl.zeros([BLOCK_M, V], gl.float32, VALUES))
    buffer = 0
    for first in range(lo, hi, BLOCK_N):
        async_copy.wait_group(0)
        fence_async_shared()
        k_NV, k_NR = kv_V.index(buffer), kv_R.index(buffer)
        s = warpgroup_mma(q_R, k_NR.permute((1, 0)), nothing, use_acc=False, is_async=True)
        held, s = warpgroup_mma_wait(0, deps=(acc, s))  # the step before is done with the other buffer
        pos = first + BLOCK_N + n
        kept = cache + (page.to(gl.int64) * S + pos % S)[:, None] * C
        s = warpgroup_mma(q_V, k_NV.permute((1, 0)), s, is_async=True)
        # Asked for earlier it would come sooner, but these products would wait for it: up to 9% slower.
        _copy(kv_V, kv_R, 1 - buffer, kept, v, r, (pos < hi)[:, None])
        page = gl.load(table + (pos + BLOCK_N) // S, mask=pos + BLOCK_N < hi, other=0)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = gl.where(first + columns <= end, s * scale_log2, -float("inf"))
        p, keep, top = _fold(s, top)
        mass = mass * keep[:, None] + p
        # Through shared memory to registers: wgmma may read them without the fence that waits for the copies under way.
        p_MN.store(p.to(gl.bfloat16))
        p = p_MN.load(gl.DotOperandLayout(0, VALUES, 2))
        held = held * gl.convert_layout(keep, gl.SliceLayout(1, VALUES))[:, None]
        acc = warpgroup_mma(p, k_NV, held, is_async=True)
        buffer = 1 - buffer
    held = warpgroup_mma_wait(0, deps=(acc,))
    async_copy.wait_group(0)
    return held, gl.sum(mass, 1), top


@jit
def latent_sm90(  # type: ignore[no-untyped-def]
    q, cache, out, partial, lse, row_slot, row_start, row_count, row_offset, page_table, table_stride, num_splits,
    least, most_tokens, scale_log2,
    H: gl.constexpr, V: gl.constexpr, C: gl.constexpr, S: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    CHUNKS: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `_latent` of the portable kernel, which says what the arguments are."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, V // 2, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    PAIRS: gl.constexpr = gl.SliceLayout(1, SCORES)
    R: gl.constexpr = C - V

    _await_inputs(PDL)
    tile, split, row = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1), gl.program_id(2)
    slot, start = gl.load(row_slot + row), gl.load(row_start + row)
    count, offset = 1, row
    if CHUNKS:
        count, offset = gl.load(row_count + row), gl.load(row_offset + row)
    if tile * BLOCK_M >= count * H:
        return
    lo, hi, part = _context(start, count, tile, split, num_splits, least, H, BLOCK_M, BLOCK_N, SPLIT)
    if slot < 0:
        hi = 0
    stored = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, VALUES))
    dims = gl.arange(0, V, layout=gl.SliceLayout(0, VALUES))[None, :]
    heads = offset.to(gl.int64) * H + stored
    if lo >= hi:  # left here, so that the loop below always runs: else ptxas makes its products wait for each other
        if not SPLIT:
            nil = gl.zeros([BLOCK_M, V], gl.bfloat16, VALUES)
            gl.store(out + heads[:, None] * V + dims, nil, mask=(stored < count * H)[:, None])
        return

    n = gl.arange(0, BLOCK_N, layout=ROWS)
    v = gl.arange(0, V, layout=gl.SliceLayout(0, COPY))[None, :]
    r = V + gl.arange(0, R, layout=gl.SliceLayout(0, COPY))[None, :]
    q_V = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, V], SHARED)
    q_R = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, R], SHARED)
    kv_V = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, V], SHARED)
    kv_R = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, R], SHARED)
    p_MN = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], SHARED)
    asked = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=ROWS)
    q_at = q + (offset.to(gl.int64) * H + asked)[:, None] * C
    async_copy.async_copy_global_to_shared(q_V, q_at + v, mask=(asked < count * H)[:, None])
    async_copy.async_copy_global_to_shared(q_R, q_at + r, mask=(asked < count * H)[:, None])
    table = page_table + gl.maximum(slot, 0).to(gl.int64) * table_stride
    pos = lo + n
    page = gl.load(table + pos // S, mask=pos < hi, other=0)
    _copy(kv_V, kv_R, 0, cache + (page.to(gl.int64) * S + pos % S)[:, None] * C, v, r, (pos < hi)[:, None])
    page = gl.load(table + (pos + BLOCK_N) // S, mask=pos + BLOCK_N < hi, other=0)  # one tile ahead of its copy

    pairs = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=PAIRS)
    end = gl.minimum(start + pairs // H, hi - 1)[:, None]  # the last position that each pair sees
    acc, mass, top = _attend(
        q_V, q_R, kv_V, kv_R, p_MN, cache, table, page, lo, hi, end, n, v, r, scale_log2,
        V, C, S, BLOCK_M, BLOCK_N, SCORES, VALUES,
    )  # fmt: skip
    _let_next_start(PDL)
    total = gl.where(mass > 0, mass, 1.0)
    result = acc / gl.convert_layout(total, gl.SliceLayout(1, VALUES))[:, None]
    if SPLIT and start + count > part:  # else this is the row's only part: there is nothing to merge
        parts = (row * most_tokens).to(gl.int64) * H
        part_at = ((parts + stored) * num_splits + split)[:, None]
        gl.store(partial + part_at * V + dims, result, mask=(stored < count * H)[:, None])
        gl.store(lse + (parts + pairs) * num_splits + split, top + gl.log2(total), mask=pairs < count * H)
        return
    gl.store(out + heads[:, None] * V + dims, result.to(gl.bfloat16), mask=(stored < count * H)[:, None])
