"""What stands between the fused q, k, v product and attention: q and k norms, rotation, the write into the cache.

Shapes: T tokens, H query heads, K KV heads, D head dim, N pages, S page size, R rotary dims. cos and sin are tables of
every position, [max_len, 1, R], both halves alike. A slot is page * S + offset; a negative one marks a token that is
not kept.
"""

from __future__ import annotations

import torch

from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton
from headrace.kernels.kv_write import slot_stride, write_kv
from headrace.kernels.norm import FLOATS, rms_norm


def rotate(x_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + R/2) of every head: the reference."""
    half = x_THR.shape[-1] // 2
    turned = torch.cat((-x_THR[..., half:], x_THR[..., :half]), dim=-1)
    return torch.addcmul(x_THR * cos_T1R, turned, sin_T1R)


def deinterleave(x_THR: torch.Tensor) -> torch.Tensor:
    """Reorder pairs (2i, 2i+1) to (i, i + R/2)."""
    return x_THR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def prepare_gqa(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cache_NSKD: torch.Tensor,
    q_norm_w: torch.Tensor | None,
    k_norm_w: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """[T, (H + 2K) * D] -> queries [T, H, D], normed and rotated; keys (the same) and values go to the cache.

    cache: [N, S, 2, K, D].
    """
    if qkv.is_cuda and qkv.dtype in FLOATS:
        return prepare_gqa_triton(
            qkv, heads, kv_heads, cos, sin, positions_T, slots_T, cache_NSKD, q_norm_w, k_norm_w, eps
        )
    qkv_TXD = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    qk, v_TKD = qkv_TXD[:, : heads + kv_heads], qkv_TXD[:, heads + kv_heads :]
    if q_norm_w is not None and k_norm_w is not None:
        qk = torch.cat((rms_norm(qk[:, :heads], q_norm_w, eps), rms_norm(qk[:, heads:], k_norm_w, eps)), dim=1)
    qk = rotate(qk, cos.index_select(0, positions_T), sin.index_select(0, positions_T))
    write_kv(qk[:, heads:], v_TKD, cache_NSKD, slots_T)
    return qk[:, :heads]


@jit
def _prepare_gqa_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr, q_ptr, cache_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_weight_ptr, k_weight_ptr,
    qkv_stride, slot_stride, table_stride, heads, kv_heads, half, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = 2 * half
    column = tl.arange(0, HALF)
    inside = column < half
    if NORM:
        q_low = tl.load(q_weight_ptr + column, mask=inside, other=0.0)
        k_low = tl.load(k_weight_ptr + column, mask=inside, other=0.0)
        q_high = tl.load(q_weight_ptr + half + column, mask=inside, other=0.0)
        k_high = tl.load(k_weight_ptr + half + column, mask=inside, other=0.0)
    await_inputs(PDL)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    mask = (head < heads + 2 * kv_heads)[:, None] & inside[None, :]
    source = qkv_ptr + token * qkv_stride + head[:, None] * dim + column[None, :]
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * table_stride + column, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * table_stride + column, mask=inside, other=0.0).to(tl.float32)
    is_query = (head < heads)[:, None]
    plain = (head >= heads + kv_heads)[:, None]  # values: neither normed nor rotated
    a, b = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / dim + eps)[:, None]
        a = low * scale * tl.where(is_query, q_low[None, :], k_low[None, :]).to(tl.float32)
        b = high * scale * tl.where(is_query, q_high[None, :], k_high[None, :]).to(tl.float32)
    new_low = tl.where(plain, low, a * cos[None, :] - b * sin[None, :])
    new_high = tl.where(plain, high, b * cos[None, :] + a * sin[None, :])
    let_next_start(PDL)
    # Keys and values lie behind each other in a slot, as they do in qkv.
    to_q = q_ptr + (token * heads + head[:, None]) * dim + column[None, :]
    to_cache = cache_ptr + slot * slot_stride + (head - heads)[:, None] * dim + column[None, :]
    kept = mask & (head >= heads)[:, None] & (slot >= 0)
    tl.store(to_q, new_low.to(q_ptr.dtype.element_ty), mask=mask & is_query)
    tl.store(to_q + half, new_high.to(q_ptr.dtype.element_ty), mask=mask & is_query)
    tl.store(to_cache, new_low.to(cache_ptr.dtype.element_ty), mask=kept)
    tl.store(to_cache + half, new_high.to(cache_ptr.dtype.element_ty), mask=kept)


def prepare_gqa_triton(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    cache_NSKD: torch.Tensor,
    q_norm_w: torch.Tensor | None,
    k_norm_w: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """The same in one launch: a program takes some heads of one token."""
    tokens, total = qkv.shape[0], heads + 2 * kv_heads
    dim = qkv.shape[1] // total
    assert qkv.ndim == 2 and qkv.stride(1) == 1 and qkv.shape[1] == total * dim
    assert cos.shape[-1] == dim and dim % 2 == 0, "the whole head is rotated"
    check_tables(cos, sin, positions_T, slots_T, tokens)
    assert cache_NSKD.shape[2:] == (2, kv_heads, dim)
    assert (q_norm_w is None) == (k_norm_w is None)
    q_THD = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q_THD
    block = 4 if tokens <= 256 else 16
    _prepare_gqa_kernel[(tokens, triton.cdiv(total, block))](
        qkv, q_THD, cache_NSKD, cos, sin, positions_T, slots_T, q_norm_w, k_norm_w,
        qkv.stride(0), slot_stride(cache_NSKD), cos.stride(0), heads, kv_heads, dim // 2, eps,
        NORM=q_norm_w is not None, HEADS=block, HALF=triton.next_power_of_2(dim // 2), num_warps=block // 4,
        **launch_options(qkv.device),
    )  # fmt: skip
    return q_THD


def check_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor | None, tokens: int
) -> None:
    """Tables alike and dense, an int64 position (and slot) a token."""
    assert cos.shape == sin.shape and cos.is_contiguous() and sin.is_contiguous()
    for index in (positions_T, slots_T):
        if index is not None:
            assert index.shape == (tokens,) and index.is_contiguous() and index.dtype == torch.int64
