"""The small steps of multi-head latent attention (DeepSeek-V2): norms and the cache's row, queries into the latent
space, outputs out of it.

Shapes: T tokens, H local query heads, N nope dims, R rope dims, V value dims, C latent dims, Q width of the query part
of the first product, A = Q + C + R, Z = C + R. cos and sin are tables of every position, [max_len, 1, R], both halves
alike. `interleaved`: pairs to rotate lie side by side, (2i, 2i+1), and are brought to (i, i + R/2) first.
"""

from __future__ import annotations

import torch

from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton
from headrace.kernels.kv_write import slot_stride, write_latent
from headrace.kernels.norm import FLOATS, rms_norm
from headrace.kernels.rotary import check_tables, deinterleave, rotate

FEW = 64
"""Tokens up to which the products are a stream of weights; more are left to the library's."""


def prepare_latent(
    a_TA: torch.Tensor,
    q_norm_w: torch.Tensor | None,
    kv_norm_w: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cache_NSZ: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """The query part, normed where it has a norm: [T, Q]; [normed latent | rotated key] goes to the cache."""
    if a_TA.is_cuda and a_TA.dtype in FLOATS:
        return prepare_latent_triton(
            a_TA, q_norm_w, kv_norm_w, eps, cos, sin, positions_T, slots_T, cache_NSZ, interleaved
        )
    rank, rope_dim = kv_norm_w.shape[0], cos.shape[-1]
    q, latent, key = a_TA.split((a_TA.shape[1] - rank - rope_dim, rank, rope_dim), dim=-1)
    key = deinterleave(key) if interleaved else key
    key = rotate(key.unsqueeze(1), cos.index_select(0, positions_T), sin.index_select(0, positions_T)).squeeze(1)
    write_latent(torch.cat((rms_norm(latent, kv_norm_w, eps), key), dim=-1), cache_NSZ, slots_T)
    return q if q_norm_w is None else rms_norm(q, q_norm_w, eps)


def absorb_query(
    q_THQ: torch.Tensor, w_uk_HNC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions_T: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """[T, H, N + R] -> [T, H, C + R]: the nope part times W_uk of its head, and the rotated rope part."""
    if q_THQ.is_cuda and q_THQ.dtype in FLOATS:
        form = absorb_query_triton if len(q_THQ) <= FEW else absorb_query_bmm
        return form(q_THQ, w_uk_HNC, cos, sin, positions_T, interleaved)
    nope = w_uk_HNC.shape[1]
    q_latent = torch.bmm(q_THQ[..., :nope].transpose(0, 1), w_uk_HNC).transpose(0, 1)
    q_rope = deinterleave(q_THQ[..., nope:]) if interleaved else q_THQ[..., nope:]
    q_rope = rotate(q_rope, cos.index_select(0, positions_T), sin.index_select(0, positions_T))
    return torch.cat((q_latent, q_rope), dim=-1)


def expand_value(out_THC: torch.Tensor, w_uv_HCV: torch.Tensor) -> torch.Tensor:
    """[T, H, C] -> [T, H * V]: every head's output times its W_uv."""
    if out_THC.is_cuda and out_THC.dtype in FLOATS:
        form = expand_value_triton if len(out_THC) <= FEW else expand_value_bmm
        return form(out_THC, w_uv_HCV)
    return torch.bmm(out_THC.transpose(0, 1), w_uv_HCV).transpose(0, 1).flatten(1)


@jit
def _prepare_latent_kernel(  # type: ignore[no-untyped-def]
    a_ptr, q_ptr, cache_ptr, q_weight_ptr, kv_weight_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    a_stride, slot_stride, table_stride, q_dim, rank, half, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, Q_BLOCK: tl.constexpr, C_BLOCK: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = a_ptr + token * a_stride
    if tl.program_id(1) == 0:  # the row of the cache
        column = tl.arange(0, C_BLOCK)
        pair = tl.arange(0, HALF)
        weight = tl.load(kv_weight_ptr + column, mask=column < rank, other=0.0)
        await_inputs(PDL)
        position = tl.load(positions_ptr + token)
        slot = tl.load(slots_ptr + token)
        latent = tl.load(row + q_dim + column, mask=column < rank, other=0.0).to(tl.float32)
        key = row + q_dim + rank
        low_at = 2 * pair if INTERLEAVED else pair
        high_at = 2 * pair + 1 if INTERLEAVED else pair + half
        low = tl.load(key + low_at, mask=pair < half, other=0.0).to(tl.float32)
        high = tl.load(key + high_at, mask=pair < half, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + position * table_stride + pair, mask=pair < half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * table_stride + pair, mask=pair < half, other=0.0).to(tl.float32)
        normed = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / rank + eps) * weight.to(tl.float32)
        let_next_start(PDL)
        target = cache_ptr + slot * slot_stride
        kept = slot >= 0
        element = cache_ptr.dtype.element_ty
        tl.store(target + column, normed.to(element), mask=(column < rank) & kept)
        tl.store(target + rank + pair, (low * cos - high * sin).to(element), mask=(pair < half) & kept)
        tl.store(target + rank + half + pair, (high * cos + low * sin).to(element), mask=(pair < half) & kept)
    elif NORM:  # without it there is no such program
        wide = tl.arange(0, Q_BLOCK)
        q_weight = tl.load(q_weight_ptr + wide, mask=wide < q_dim, other=0.0)
        await_inputs(PDL)
        q = tl.load(row + wide, mask=wide < q_dim, other=0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, axis=0) / q_dim + eps) * q_weight.to(tl.float32)
        let_next_start(PDL)
        tl.store(q_ptr + token * q_dim + wide, q.to(q_ptr.dtype.element_ty), mask=wide < q_dim)


def prepare_latent_triton(
    a_TA: torch.Tensor,
    q_norm_w: torch.Tensor | None,
    kv_norm_w: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cache_NSZ: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """The same in one launch: a program a token for the cache's row, another for the query's norm."""
    tokens, rank, rope_dim = a_TA.shape[0], kv_norm_w.shape[0], cos.shape[-1]
    q_dim = a_TA.shape[1] - rank - rope_dim
    assert a_TA.ndim == 2 and a_TA.stride(1) == 1 and cache_NSZ.shape[2] == rank + rope_dim
    assert q_norm_w is None or q_norm_w.shape == (q_dim,)
    check_tables(cos, sin, positions_T, slots_T, tokens)
    q_TQ = a_TA[:, :q_dim] if q_norm_w is None else a_TA.new_empty(tokens, q_dim)
    if tokens:
        q_block = triton.next_power_of_2(q_dim) if q_norm_w is not None else 1
        _prepare_latent_kernel[(tokens, 1 if q_norm_w is None else 2)](
            a_TA, q_TQ, cache_NSZ, q_norm_w, kv_norm_w, cos, sin, positions_T, slots_T,
            a_TA.stride(0), slot_stride(cache_NSZ), cos.stride(0), q_dim, rank, rope_dim // 2, eps,
            NORM=q_norm_w is not None, INTERLEAVED=interleaved, Q_BLOCK=q_block,
            C_BLOCK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(rope_dim // 2), num_warps=4,
            **launch_options(a_TA.device),
        )  # fmt: skip
    return q_TQ


@jit
def _absorb_query_kernel(  # type: ignore[no-untyped-def]
    q_ptr, w_ptr, y_ptr, cos_ptr, sin_ptr, positions_ptr, tokens, nope, rank, half, heads,
    q_token, q_head, w_head, w_nope, w_rank, table_stride,
    INTERLEAVED: tl.constexpr, TOKENS: tl.constexpr, NOPE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = (token < tokens)[:, None]
    q = q_ptr + (token * q_token + head * q_head)[:, None]
    y = y_ptr + ((token * heads + head) * (rank + 2 * half))[:, None]
    element = y_ptr.dtype.element_ty
    if part == tl.num_programs(0) - 1:  # the rope part
        pair = tl.arange(0, HALF)
        mask = present & (pair < half)[None, :]
        await_inputs(PDL)
        position = tl.load(positions_ptr + token, mask=token < tokens, other=0)
        table = (position * table_stride)[:, None] + pair[None, :]
        low_at = 2 * pair if INTERLEAVED else pair
        high_at = 2 * pair + 1 if INTERLEAVED else pair + half
        low = tl.load(q + nope + low_at[None, :], mask=mask, other=0.0).to(tl.float32)
        high = tl.load(q + nope + high_at[None, :], mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + rank + pair[None, :], (low * cos - high * sin).to(element), mask=mask)
        tl.store(y + rank + half + pair[None, :], (high * cos + low * sin).to(element), mask=mask)
    else:
        inner = tl.arange(0, NOPE)
        column = part * BLOCK + tl.arange(0, BLOCK)
        w = w_ptr + head * w_head + inner[:, None] * w_nope + column[None, :] * w_rank
        w_NC = tl.load(w, mask=(inner < nope)[:, None] & (column < rank)[None, :], other=0.0)
        await_inputs(PDL)
        q_TN = tl.load(q + inner[None, :], mask=present & (inner < nope)[None, :], other=0.0)
        y_TC = tl.dot(q_TN, w_NC, input_precision="ieee")
        let_next_start(PDL)
        tl.store(y + column[None, :], y_TC.to(element), mask=present & (column < rank)[None, :])


def absorb_tiles(tokens: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """(tokens a program, latent columns a program, warps, stages)."""
    if dtype == torch.float32:
        return 32, 32, 4, 1  # fits the shared memory of every part
    if tokens <= 16:
        return 16, 64, 4, 1
    return min(FEW, triton.next_power_of_2(tokens)), 128, 4, 1


def absorb_query_triton(
    q_THQ: torch.Tensor, w_uk_HNC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions_T: torch.Tensor,
    interleaved: bool, tiles: tuple[int, int, int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same in one launch: a program takes some tokens, one head, and a block of latent columns or the rope part."""
    y_THZ = q_THQ.new_empty(*q_THQ.shape[:2], w_uk_HNC.shape[2] + cos.shape[-1])
    _launch_absorb(q_THQ, w_uk_HNC, cos, sin, positions_T, interleaved, y_THZ, tiles, products=True)
    return y_THZ


def absorb_query_bmm(
    q_THQ: torch.Tensor, w_uk_HNC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions_T: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """The same in two launches: the library's product, written in place, and the rope part."""
    nope, rank = w_uk_HNC.shape[1:]
    y_THZ = q_THQ.new_empty(*q_THQ.shape[:2], rank + cos.shape[-1])
    torch.bmm(q_THQ[..., :nope].transpose(0, 1), w_uk_HNC, out=y_THZ[..., :rank].transpose(0, 1))
    # The rope part is the second, so that what follows may start early.
    _launch_absorb(q_THQ, w_uk_HNC, cos, sin, positions_T, interleaved, y_THZ, (32, 16, 4, 1), products=False)
    return y_THZ


def _launch_absorb(
    q_THQ: torch.Tensor, w_uk_HNC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions_T: torch.Tensor,
    interleaved: bool, y_THZ: torch.Tensor, tiles: tuple[int, int, int, int] | None, products: bool,
) -> None:  # fmt: skip
    """Fill y, or only its rope part."""
    tokens, heads, width = q_THQ.shape
    nope, rank, rope_dim = w_uk_HNC.shape[1], w_uk_HNC.shape[2], cos.shape[-1]
    assert q_THQ.stride(2) == 1 and width == nope + rope_dim and w_uk_HNC.shape[0] == heads
    assert w_uk_HNC.dtype == q_THQ.dtype
    check_tables(cos, sin, positions_T, None, tokens)
    if not tokens:
        return
    per, block, warps, stages = tiles or absorb_tiles(tokens, q_THQ.dtype)
    block = min(block, max(16, triton.next_power_of_2(rank)))
    parts = triton.cdiv(rank, block) if products else 0
    _absorb_query_kernel[(parts + 1, heads, triton.cdiv(tokens, per))](
        q_THQ, w_uk_HNC, y_THZ, cos, sin, positions_T, tokens, nope, rank, rope_dim // 2, heads,
        q_THQ.stride(0), q_THQ.stride(1), *w_uk_HNC.stride(), cos.stride(0),
        INTERLEAVED=interleaved, TOKENS=per, NOPE=max(16, triton.next_power_of_2(nope)), BLOCK=block,
        HALF=triton.next_power_of_2(rope_dim // 2), num_warps=warps, num_stages=stages,
        **launch_options(q_THQ.device),
    )  # fmt: skip


@jit
def _expand_value_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, tokens, value, heads, x_token, x_head, w_head, w_rank, w_value,
    RANK: tl.constexpr, TOKENS: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    present = (token < tokens)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, INNER)
    x = x_ptr + (token * x_token + head * x_head)[:, None] + inner[None, :]
    w = w_ptr + head * w_head + inner[:, None] * w_rank + column[None, :] * w_value
    if INNER >= RANK:  # few tokens: all weights of the program are on their way before it waits
        w_CV = tl.load(w, mask=(inner < RANK)[:, None] & (column < value)[None, :], other=0.0)
        await_inputs(PDL)
        x_TC = tl.load(x, mask=present & (inner < RANK)[None, :], other=0.0)
        y_TV = tl.dot(x_TC, w_CV, input_precision="ieee")
    else:
        await_inputs(PDL)
        y_TV = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
        for start in range(0, RANK, INNER):
            left = RANK - start
            x_TC = tl.load(x + start, mask=present & (inner < left)[None, :], other=0.0)
            w_CV = tl.load(w + start * w_rank, mask=(inner < left)[:, None] & (column < value)[None, :], other=0.0)
            y_TV = tl.dot(x_TC, w_CV, y_TV, input_precision="ieee")
    let_next_start(PDL)
    y = y_ptr + ((token * heads + head) * value)[:, None] + column[None, :]
    tl.store(y, y_TV.to(y_ptr.dtype.element_ty), mask=present & (column < value)[None, :])


def expand_tiles(tokens: int, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """(tokens a program, values a program, latent dims a step, warps, stages)."""
    if dtype == torch.float32:
        return 32, 32, 32, 4, 2
    if tokens <= 32:
        return max(16, triton.next_power_of_2(tokens)), 32, 512, 4, 1
    return FEW, 64, 128, 4, 3


def expand_value_triton(
    out_THC: torch.Tensor, w_uv_HCV: torch.Tensor, tiles: tuple[int, int, int, int, int] | None = None
) -> torch.Tensor:
    """The same in one launch: a program takes some tokens, one head and a block of values."""
    tokens, heads, rank = out_THC.shape
    value = w_uv_HCV.shape[2]
    assert out_THC.stride(2) == 1 and w_uv_HCV.shape[:2] == (heads, rank) and w_uv_HCV.dtype == out_THC.dtype
    y = out_THC.new_empty(tokens, heads * value)
    if not tokens:
        return y
    per, block, inner, warps, stages = tiles or expand_tiles(tokens, out_THC.dtype)
    block = min(block, max(16, triton.next_power_of_2(value)))
    _expand_value_kernel[(triton.cdiv(value, block), heads, triton.cdiv(tokens, per))](
        out_THC, w_uv_HCV, y, tokens, value, heads, out_THC.stride(0), out_THC.stride(1), *w_uv_HCV.stride(),
        RANK=rank, TOKENS=per, INNER=min(inner, max(16, triton.next_power_of_2(rank))), BLOCK=block,
        num_warps=warps, num_stages=stages, **launch_options(out_THC.device),
    )  # fmt: skip
    return y


def expand_value_bmm(out_THC: torch.Tensor, w_uv_HCV: torch.Tensor) -> torch.Tensor:
    """The same by the library's product, which writes in place."""
    y_THV = out_THC.new_empty(*out_THC.shape[:2], w_uv_HCV.shape[2])
    torch.bmm(out_THC.transpose(0, 1), w_uv_HCV, out=y_THV.transpose(0, 1))
    return y_THV.flatten(1)
