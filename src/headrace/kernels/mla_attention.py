"""Multi-head latent attention over pages of latent rows (weights absorbed), and over keys expanded for long prompts.

Shapes: T tokens of the step, R rows, H local query heads, C latent and rope dims, V value dims, N pages, S page size,
L expanded positions, Q query dims of a head, Z splits of a context. Row arrays are int32 [R]; a row with slot -1 is
padding: it reads nothing and gives zeros.
"""

from __future__ import annotations

import torch

from headrace.kernels import mla_hopper
from headrace.kernels.attention_tiles import (
    PRECISION,
    decode_splits,
    expanded_tiles,
    finish,
    fold,
    latent_tiles,
    least_part,
    merge,
    num_sms,
    padded,
    reference_paged,
    shared_limit,
    split_length,
)
from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton

LOG2_E = 1.4426950408889634
LEAST_PAIRS = 16
"""(Position, head) pairs up to which the portable kernel's narrow tile wastes less than the 64 rows of wgmma."""


@jit
def _latent(  # type: ignore[no-untyped-def]
    q, cache, out, partial, lse, row_slot, row_start, row_count, row_offset, page_table, table_stride, num_splits,
    least, most_tokens, scale_log2,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of (position, head) pairs of one row over one part of its context, which is read once for all."""
    tile, split, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    await_inputs(PDL)
    slot, start, count, offset = tl.load(row_slot + row), tl.load(row_start + row), 1, row
    if CHUNKS:
        count, offset = tl.load(row_count + row), tl.load(row_offset + row)
    if tile * BLOCK_M >= count * H:
        return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at = pairs // H  # position within the row
    valid = pairs < count * H
    heads = offset.to(tl.int64) * H + pairs
    lo, hi = 0, start + tl.minimum(count, (tile * BLOCK_M + BLOCK_M - 1) // H + 1)
    if slot < 0:
        hi = 0
    if SPLIT:
        part = split_length(start + count, num_splits, least, BLOCK_N)
        lo = split * part
        hi = tl.minimum(hi, lo + part)
        if lo >= hi:
            return
    v, r, n = tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    q_MV = tl.load(q + heads[:, None] * C + v[None, :], mask=valid[:, None] & (v < V)[None, :], other=0.0)
    q_MR = tl.load(q + heads[:, None] * C + V + r[None, :], mask=valid[:, None] & (r < C - V)[None, :], other=0.0)
    top, mass = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    table = page_table + tl.maximum(slot, 0).to(tl.int64) * table_stride
    page = tl.load(table + (lo + n) // S, mask=lo + n < hi, other=0)  # looked up one tile ahead of its use
    for first in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        pos = first + n
        kept = cache + (page.to(tl.int64) * S + pos % S)[:, None] * C
        inside = (pos < hi)[:, None]
        k_NV = tl.load(kept + v[None, :], mask=inside & (v < V)[None, :], other=0.0)
        k_NR = tl.load(kept + V + r[None, :], mask=inside & (r < C - V)[None, :], other=0.0)
        page = tl.load(table + (pos + BLOCK_N) // S, mask=pos + BLOCK_N < hi, other=0)
        s = tl.dot(q_MR, tl.trans(k_NR), input_precision=PREC)
        s = tl.dot(q_MV, tl.trans(k_NV), s, input_precision=PREC) * scale_log2
        s = tl.where((pos < hi)[None, :] & (pos[None, :] <= (start + at)[:, None]), s, -float("inf"))
        p, keep, top, mass = fold(s, top, mass)
        acc = tl.dot(p.to(k_NV.dtype), k_NV, acc * keep[:, None], input_precision=PREC)
    let_next_start(PDL)
    acc, logarithm = finish(acc, top, mass)
    stored = valid[:, None] & (v < V)[None, :]
    if SPLIT and start + count > part:  # else this is the row's only part: there is nothing to merge
        parts = ((row * most_tokens).to(tl.int64) * H + pairs) * num_splits + split
        tl.store(partial + parts[:, None] * V + v[None, :], acc, mask=stored)
        tl.store(lse + parts, logarithm, mask=valid)
        return
    tl.store(out + heads[:, None] * V + v[None, :], acc.to(out.dtype.element_ty), mask=stored)


@jit
def _expanded(  # type: ignore[no-untyped-def]
    q, k, rope, v, out, row_offset, row_count, kv_offset, kv_len, k_stride, k_head, rope_stride, v_stride, v_head,
    scale_log2,
    H: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of positions of one row and head; only the tiles on the diagonal are masked."""
    tile, head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count, length = tl.load(row_count + row), tl.load(kv_len + row)
    if tile * BLOCK_M >= count:
        return
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = (tl.load(row_offset + row) + at).to(tl.int64) * H + head
    end = length - count + at  # the last position that each query sees
    hi = tl.minimum(length, length - count + (tile + 1) * BLOCK_M)
    full = tl.maximum(length - count + tile * BLOCK_M + 1, 0) // BLOCK_N * BLOCK_N
    d, r, e, n = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)
    valid = (at < count)[:, None]
    q_MK = tl.load(q + heads[:, None] * (N + R) + d[None, :], mask=valid & (d < N)[None, :], other=0.0)
    q_MR = tl.load(q + heads[:, None] * (N + R) + N + r[None, :], mask=valid & (r < R)[None, :], other=0.0)
    top, mass = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    base = tl.load(kv_offset + row).to(tl.int64)
    k_at = k + base * k_stride + head * k_head + d[None, :]
    rope_at = rope + base * rope_stride + r[None, :]
    v_at = v + base * v_stride + head * v_head + e[None, :]
    for first in tl.range(0, full, BLOCK_N, num_stages=STAGES):
        pos = (first + n).to(tl.int64)[:, None]
        k_NK = tl.load(k_at + pos * k_stride, mask=(d < N)[None, :], other=0.0)
        k_NR = tl.load(rope_at + pos * rope_stride, mask=(r < R)[None, :], other=0.0)
        v_NV = tl.load(v_at + pos * v_stride, mask=(e < V)[None, :], other=0.0)
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PREC)
        s = tl.dot(q_MR, tl.trans(k_NR), s, input_precision=PREC) * scale_log2
        p, keep, top, mass = fold(s, top, mass)
        acc = tl.dot(p.to(v_NV.dtype), v_NV, acc * keep[:, None], input_precision=PREC)
    for first in tl.range(full, hi, BLOCK_N, num_stages=STAGES):
        pos = (first + n).to(tl.int64)[:, None]
        inside = pos < hi
        k_NK = tl.load(k_at + pos * k_stride, mask=inside & (d < N)[None, :], other=0.0)
        k_NR = tl.load(rope_at + pos * rope_stride, mask=inside & (r < R)[None, :], other=0.0)
        v_NV = tl.load(v_at + pos * v_stride, mask=inside & (e < V)[None, :], other=0.0)
        s = tl.dot(q_MK, tl.trans(k_NK), input_precision=PREC)
        s = tl.dot(q_MR, tl.trans(k_NR), s, input_precision=PREC) * scale_log2
        s = tl.where((first + n)[None, :] <= end[:, None], s, -float("inf"))
        p, keep, top, mass = fold(s, top, mass)
        acc = tl.dot(p.to(v_NV.dtype), v_NV, acc * keep[:, None], input_precision=PREC)
    acc, _ = finish(acc, top, mass)
    tl.store(out + heads[:, None] * V + e[None, :], acc.to(out.dtype.element_ty), mask=valid & (e < V)[None, :])


def mla_decode(
    q_THC: torch.Tensor, cache_NSC: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    page_table: torch.Tensor, value_dim: int, scale: float, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of one token a row (token r is row r) to its context [0, start]: [T, H, V]."""
    if not q_THC.is_cuda:
        rows = torch.arange(row_slot.shape[0], dtype=torch.int32)
        ones = torch.ones_like(rows)
        return mla_reference(q_THC, cache_NSC, row_slot, row_start, ones, rows, page_table, value_dim, scale)
    return mla_kernel(q_THC, cache_NSC, row_slot, row_start, None, None, page_table, value_dim, scale, 1, num_splits)


def mla_prefill(
    q_THC: torch.Tensor, cache_NSC: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor, row_offset: torch.Tensor, page_table: torch.Tensor, value_dim: int, scale: float,
    max_count: int, num_splits: int = 1, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of rows of any count up to `max_count`, causal: [T, H, V], or into `out`; tokens of no row are left.

    A step of single tokens and chunks is two calls with one `out`: rows of one with splits, then the chunks.
    """
    rows = (row_slot, row_start, row_count, row_offset)
    if not q_THC.is_cuda:
        return mla_reference(q_THC, cache_NSC, *rows, page_table, value_dim, scale, out)
    return mla_kernel(q_THC, cache_NSC, *rows, page_table, value_dim, scale, max_count, num_splits, None, out)


def mla_prefill_expanded(
    q_THQ: torch.Tensor, k_LHN: torch.Tensor, rope_LR: torch.Tensor, v_LHV: torch.Tensor, row_offset: torch.Tensor,
    row_count: torch.Tensor, kv_offset: torch.Tensor, kv_len: torch.Tensor, scale: float, max_count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of rows to keys and values made from their latents: [T, H, V], causal, a row's queries at its end.

    k and v may be views of one product, and the rope part, which all heads share, of the latent rows. Positions
    [kv_offset, kv_offset + kv_len) of them are a row's; queries are N dims and then R.
    """
    rows = (row_offset, row_count, kv_offset, kv_len)
    if not q_THQ.is_cuda:
        return expanded_reference(q_THQ, k_LHN, rope_LR, v_LHV, *rows, scale, out)
    return expanded_kernel(q_THQ, k_LHN, rope_LR, v_LHV, *rows, scale, max_count, out)


def mla_splits(num_rows: int, num_heads: int, max_len: int, device: torch.device) -> int:
    """`num_splits` for a decode step of `num_rows` rows, none of which is longer than `max_len`."""
    block = mla_hopper.BLOCK_M
    if not mla_hopper.supports(device, torch.bfloat16, 576, 512):
        block = latent_tiles(shared_limit(device), num_heads, 576, 512, 2).block_m
    return decode_splits(num_rows, -(-num_heads // block), max_len, num_sms(device))


def mla_reference(
    q_THC: torch.Tensor, cache_NSC: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor, row_offset: torch.Tensor, page_table: torch.Tensor, value_dim: int, scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same, densely, row by row."""
    keys, rows = cache_NSC.unsqueeze(2), (row_slot, row_start, row_count, row_offset)
    return reference_paged(q_THC, keys, keys[..., :value_dim], *rows, page_table, scale, out)


def expanded_reference(
    q_THQ: torch.Tensor, k_LHN: torch.Tensor, rope_LR: torch.Tensor, v_LHV: torch.Tensor, row_offset: torch.Tensor,
    row_count: torch.Tensor, kv_offset: torch.Tensor, kv_len: torch.Tensor, scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same, densely, row by row."""
    wide = torch.float64 if q_THQ.dtype == torch.float64 else torch.float32
    keys = torch.cat((k_LHN, rope_LR.unsqueeze(1).expand(-1, k_LHN.shape[1], -1)), dim=-1).to(wide)
    out = q_THQ.new_zeros(*q_THQ.shape[:2], v_LHV.shape[-1]) if out is None else out
    rows = zip(row_offset.tolist(), row_count.tolist(), kv_offset.tolist(), kv_len.tolist(), strict=True)
    for offset, count, base, length in rows:
        pos = torch.arange(length, device=q_THQ.device)
        k, v = keys[base : base + length], v_LHV[base : base + length].to(wide)
        scores = torch.einsum("thd,lhd->htl", q_THQ[offset : offset + count].to(wide), k) * scale
        scores.masked_fill_(pos[None, :] > pos[length - count :, None], float("-inf"))
        out[offset : offset + count] = torch.einsum("htl,lhd->thd", scores.softmax(-1), v).to(out.dtype)
    return out


def mla_kernel(
    q_THC: torch.Tensor, cache_NSC: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor | None, row_offset: torch.Tensor | None, page_table: torch.Tensor, value_dim: int,
    scale: float, max_count: int, num_splits: int, hopper: bool | None = None, out: torch.Tensor | None = None,
    least: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernels; `row_count` and `row_offset` None: one token a row. `hopper` False: the portable one.

    `least`: positions of a part, at least.
    """
    tokens, heads, dim = q_THC.shape
    assert cache_NSC.is_contiguous() and q_THC.is_contiguous() and cache_NSC.shape[2] == dim > value_dim
    assert q_THC.dtype == cache_NSC.dtype and page_table.stride(1) == 1 and num_splits >= 1 and scale > 0
    assert least is None or least >= 1
    assert (row_count is None) == (row_offset is None) and (row_count is not None or tokens == row_slot.shape[0])
    for array in (row_slot, row_start, row_count, row_offset, page_table):
        assert array is None or array.dtype == torch.int32
    out = q_THC.new_empty(tokens, heads, value_dim) if out is None else out
    if tokens == 0:
        return out
    partial = lse = None
    if num_splits > 1:
        parts = row_slot.shape[0] * max_count, heads, num_splits
        partial, lse = (q_THC.new_empty(size, dtype=torch.float32) for size in ((*parts, value_dim), parts))
    if hopper is None:
        hopper = mla_hopper.supports(q_THC.device, q_THC.dtype, dim, value_dim) and max_count * heads > LEAST_PAIRS
    block_m, block_n = mla_hopper.BLOCK_M, mla_hopper.BLOCK_N
    if not hopper:
        tiles = latent_tiles(shared_limit(q_THC.device), max_count * heads, dim, value_dim, q_THC.element_size())
        block_m, block_n = tiles.block_m, tiles.block_n
    grid = triton.cdiv(max_count * heads, block_m), num_splits, row_slot.shape[0]
    if least is None:
        least = least_part(grid[0] * grid[2], num_sms(q_THC.device))
    arguments = (
        q_THC, cache_NSC, out, partial, lse, row_slot, row_start, row_count, row_offset, page_table,
        page_table.stride(0), num_splits, least, max_count, scale * LOG2_E,
    )  # fmt: skip
    shape = {
        "H": heads, "V": value_dim, "C": dim, "S": cache_NSC.shape[1], "CHUNKS": row_count is not None,
        "SPLIT": num_splits > 1,
    }  # fmt: skip
    shape |= {"BLOCK_M": block_m, "BLOCK_N": block_n}
    if hopper:
        mla_hopper.latent_sm90[grid](
            *arguments, **shape, num_warps=mla_hopper.NUM_WARPS, **launch_options(q_THC.device)
        )
    else:
        _latent[grid](
            *arguments, **shape, BLOCK_V=padded(value_dim), BLOCK_R=padded(dim - value_dim),
            PREC=PRECISION[q_THC.dtype], STAGES=tiles.num_stages, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages, **launch_options(q_THC.device),
        )  # fmt: skip
    if partial is not None and lse is not None:
        merge(partial, lse, out, row_slot, row_start, row_count, row_offset, max_count, least, block_n)
    return out


def expanded_kernel(
    q_THQ: torch.Tensor, k_LHN: torch.Tensor, rope_LR: torch.Tensor, v_LHV: torch.Tensor, row_offset: torch.Tensor,
    row_count: torch.Tensor, kv_offset: torch.Tensor, kv_len: torch.Tensor, scale: float, max_count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernel over expanded keys and values."""
    tokens, heads, dim = q_THQ.shape
    nope, rope, value_dim = k_LHN.shape[2], rope_LR.shape[1], v_LHV.shape[2]
    assert dim == nope + rope and k_LHN.shape[1] == v_LHV.shape[1] == heads and q_THQ.is_contiguous() and scale > 0
    assert k_LHN.stride(2) == rope_LR.stride(1) == v_LHV.stride(2) == 1
    assert q_THQ.dtype == k_LHN.dtype == rope_LR.dtype == v_LHV.dtype
    for array in (row_offset, row_count, kv_offset, kv_len):
        assert array.dtype == torch.int32
    tiles = expanded_tiles(
        shared_limit(q_THQ.device), padded(nope) + padded(rope), padded(value_dim), q_THQ.element_size()
    )
    out = q_THQ.new_empty(tokens, heads, value_dim) if out is None else out
    if tokens == 0:
        return out
    _expanded[(triton.cdiv(max_count, tiles.block_m), heads, row_offset.shape[0])](
        q_THQ, k_LHN, rope_LR, v_LHV, out, row_offset, row_count, kv_offset, kv_len,
        k_LHN.stride(0), k_LHN.stride(1), rope_LR.stride(0), v_LHV.stride(0), v_LHV.stride(1), scale * LOG2_E,
        H=heads, N=nope, R=rope, V=value_dim, BLOCK_K=padded(nope), BLOCK_R=padded(rope), BLOCK_V=padded(value_dim),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PREC=PRECISION[q_THQ.dtype], STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
