"""Grouped-query attention over paged keys and values: rows of one token (decode) and of any count (prefill).

Shapes: T tokens of the step, R rows, H query heads, K KV heads, G = H / K, D head dim, N pages, S page size,
Z splits of a context. Row arrays are int32 [R]; a row with slot -1 is padding: it reads nothing and gives zeros.
"""

from __future__ import annotations

import torch

from headrace.kernels.attention_tiles import (
    PRECISION,
    decode_splits,
    finish,
    fold,
    gqa_tiles,
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
PLACES = 2
"""Programs of the decode kernel that live on one multiprocessor."""


@jit
def _paged(  # type: ignore[no-untyped-def]
    q, cache, out, partial, lse, row_slot, row_start, row_count, row_offset, page_table, table_stride, q_stride,
    num_splits, least, most_tokens, scale_log2,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One tile of (position, head of the group) pairs of one row and KV head, over one part of its context."""
    tile, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # longest contexts first
    kv, split = tl.program_id(2) // num_splits, tl.program_id(2) % num_splits
    await_inputs(PDL)
    slot, start, count, offset = tl.load(row_slot + row), tl.load(row_start + row), 1, row
    if CHUNKS:
        count, offset = tl.load(row_count + row), tl.load(row_offset + row)
    if tile * BLOCK_M >= count * G:
        return
    pairs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    at = pairs // G  # position within the row
    valid = pairs < count * G
    heads = ((offset + at) * (K * G) + kv * G + pairs % G).to(tl.int64)
    lo, hi = 0, start + tl.minimum(count, (tile * BLOCK_M + BLOCK_M - 1) // G + 1)
    if slot < 0:
        hi = 0
    if SPLIT:
        part = split_length(start + count, num_splits, least, BLOCK_N)
        lo = split * part
        hi = tl.minimum(hi, lo + part)
        if lo >= hi:
            return
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    q_at = (offset + at).to(tl.int64) * q_stride + (kv * G + pairs % G) * D
    q_MD = tl.load(q + q_at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    top, mass = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = page_table + tl.maximum(slot, 0).to(tl.int64) * table_stride
    page = tl.load(table + (lo + n) // S, mask=lo + n < hi, other=0)  # looked up one tile ahead of its use
    for first in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        pos = first + n
        kept = ((page.to(tl.int64) * S + pos % S) * (2 * K) + kv) * D
        inside = (pos < hi)[:, None] & (d < D)[None, :]
        k_ND = tl.load(cache + kept[:, None] + d[None, :], mask=inside, other=0.0)
        v_ND = tl.load(cache + (kept + K * D)[:, None] + d[None, :], mask=inside, other=0.0)
        page = tl.load(table + (pos + BLOCK_N) // S, mask=pos + BLOCK_N < hi, other=0)
        s = tl.dot(q_MD, tl.trans(k_ND), input_precision=PREC) * scale_log2
        s = tl.where((pos < hi)[None, :] & (pos[None, :] <= (start + at)[:, None]), s, -float("inf"))
        p, keep, top, mass = fold(s, top, mass)
        acc = tl.dot(p.to(v_ND.dtype), v_ND, acc * keep[:, None], input_precision=PREC)
    let_next_start(PDL)
    acc, logarithm = finish(acc, top, mass)
    stored = valid[:, None] & (d < D)[None, :]
    if SPLIT and start + count > part:  # else this is the row's only part: there is nothing to merge
        parts = ((row * most_tokens + at) * (K * G) + kv * G + pairs % G).to(tl.int64) * num_splits + split
        tl.store(partial + parts[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(lse + parts, logarithm, mask=valid)
        return
    tl.store(out + heads[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask=stored)


def gqa_decode(
    q_THD: torch.Tensor, cache_NSKD: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    page_table: torch.Tensor, scale: float, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of one token a row (token r is row r) to its context [0, start]: [T, H, D]."""
    if not q_THD.is_cuda:
        rows = torch.arange(row_slot.shape[0], dtype=torch.int32)
        ones = torch.ones_like(rows)
        return gqa_reference(q_THD, cache_NSKD, row_slot, row_start, ones, rows, page_table, scale)
    return gqa_kernel(q_THD, cache_NSKD, row_slot, row_start, None, None, page_table, scale, 1, num_splits)


def gqa_prefill(
    q_THD: torch.Tensor, cache_NSKD: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor, row_offset: torch.Tensor, page_table: torch.Tensor, scale: float, max_count: int,
    num_splits: int = 1, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of rows of any count up to `max_count`, causal: [T, H, D], or into `out`; tokens of no row are left.

    A step of single tokens and chunks is two calls with one `out`: rows of one with splits, then the chunks.
    """
    rows = (row_slot, row_start, row_count, row_offset)
    if not q_THD.is_cuda:
        return gqa_reference(q_THD, cache_NSKD, *rows, page_table, scale, out)
    return gqa_kernel(q_THD, cache_NSKD, *rows, page_table, scale, max_count, num_splits, out)


def gqa_splits(num_rows: int, num_kv_heads: int, max_len: int, device: torch.device) -> int:
    """`num_splits` for a decode step of `num_rows` rows, none of which is longer than `max_len`."""
    return decode_splits(num_rows, num_kv_heads, max_len, PLACES * num_sms(device))


def gqa_reference(
    q_THD: torch.Tensor, cache_NSKD: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor, row_offset: torch.Tensor, page_table: torch.Tensor, scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same, densely, row by row."""
    rows = (row_slot, row_start, row_count, row_offset)
    return reference_paged(q_THD, cache_NSKD[:, :, 0], cache_NSKD[:, :, 1], *rows, page_table, scale, out)


def gqa_kernel(
    q_THD: torch.Tensor, cache_NSKD: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor | None, row_offset: torch.Tensor | None, page_table: torch.Tensor, scale: float,
    max_count: int, num_splits: int, out: torch.Tensor | None = None, least: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Launch the kernels; `row_count` and `row_offset` None: one token a row. `least`: positions of a part."""
    tokens, heads, dim = q_THD.shape
    size, two, kv_heads = cache_NSKD.shape[1:4]
    assert two == 2 and cache_NSKD.shape[4] == dim and heads % kv_heads == 0 and cache_NSKD.is_contiguous()
    assert q_THD.dtype == cache_NSKD.dtype and q_THD.stride(2) == 1 and q_THD.stride(1) == dim
    assert page_table.stride(1) == 1 and num_splits >= 1 and scale > 0
    assert least is None or least >= 1
    assert (row_count is None) == (row_offset is None) and (row_count is not None or tokens == row_slot.shape[0])
    for array in (row_slot, row_start, row_count, row_offset, page_table):
        assert array is None or array.dtype == torch.int32
    groups = heads // kv_heads
    tiles = gqa_tiles(shared_limit(q_THD.device), max_count * groups, dim, q_THD.element_size())
    out = q_THD.new_empty(tokens, heads, dim) if out is None else out
    if tokens == 0:
        return out
    partial = lse = None
    if num_splits > 1:
        parts = row_slot.shape[0] * max_count, heads, num_splits
        partial, lse = (q_THD.new_empty(shape, dtype=torch.float32) for shape in ((*parts, dim), parts))
    blocks = triton.cdiv(max_count * groups, tiles.block_m)
    if least is None:
        least = least_part(row_slot.shape[0] * blocks * kv_heads, PLACES * num_sms(q_THD.device))
    _paged[(blocks, row_slot.shape[0], kv_heads * num_splits)](
        q_THD, cache_NSKD, out, partial, lse, row_slot, row_start, row_count, row_offset, page_table,
        page_table.stride(0), q_THD.stride(0), num_splits, least, max_count, scale * LOG2_E,
        K=kv_heads, G=groups, D=dim, S=size, BLOCK_D=padded(dim), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        CHUNKS=row_count is not None, SPLIT=num_splits > 1, PREC=PRECISION[q_THD.dtype], STAGES=tiles.num_stages,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **launch_options(q_THD.device),
    )  # fmt: skip
    if partial is not None and lse is not None:
        merge(partial, lse, out, row_slot, row_start, row_count, row_offset, max_count, least, tiles.block_n)
    return out
