"""Attention over a paged KV cache: the seam that layers call, and its PyTorch reference.

Shapes: T tokens of the step, H query heads, K KV heads, G = H / K, D head dim, C latent dims, N pages, S page size,
B requests of a group, P pages a request, L = P * S positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

MOST_SCORES = 1 << 24
"""Attention scores of a latent group that are held at once."""


@dataclass(frozen=True)
class Expansion:
    """Chunks of a latent cache whose keys and values are worth making: that costs a product for every position, and
    saves two thirds of the work for every pair of a query and a position.
    """

    first_token: int
    """The step's tokens from here on are the chunks'."""
    slots: torch.Tensor
    """[L] int64, where every position of every chunk's context is kept, chunk after chunk."""
    row_offset: torch.Tensor
    """[R] int32, a chunk's first token, counted from `first_token`."""
    row_count: torch.Tensor
    """[R] int32."""
    kv_offset: torch.Tensor
    """[R] int32, a chunk's first position in `slots`."""
    kv_len: torch.Tensor
    """[R] int32, the length of its context, its own tokens included."""
    max_count: int
    """No chunk has more tokens."""


class Attention(Protocol):
    """What one step's rows attend to. Made once a step, used by every layer of the stage."""

    @property
    def expansion(self) -> Expansion | None:
        """The chunks that `mla` is not asked for; None: all rows are."""
        ...

    def gqa(self, q_THD: torch.Tensor, cache_NSKD: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention to what the cache [N, S, 2, K, D] keeps, the step's own tokens included: [T, H, D]."""
        ...

    def mla(self, q_THC: torch.Tensor, cache_NSC: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
        """The same where all heads share one row a token; its first `value_dim` dims are values: [T, H, value_dim]."""
        ...


@dataclass(frozen=True)
class Group:
    """Rows that are computed together: `B` requests, `count` query positions each."""

    tokens: torch.Tensor | None
    """[B * count] indices into the step's tokens; None: all of them, in order."""
    count: int
    pages: torch.Tensor
    """[B * P] page ids; those past a request's length are any valid ones, masked."""
    num_requests: int
    mask: torch.Tensor | None
    """[B, 1, count, L] float: 0 where attended, -inf elsewhere; None: everything is attended."""


@dataclass(frozen=True)
class TorchAttention:
    """The reference: gathers each group's pages, then scaled-dot-product attention."""

    groups: tuple[Group, ...]
    expansion: Expansion | None = None

    def gqa(self, q_THD: torch.Tensor, cache_NSKD: torch.Tensor, scale: float) -> torch.Tensor:
        heads, kv_heads, dim = q_THD.shape[1], cache_NSKD.shape[3], q_THD.shape[2]
        out = None
        for group in self.groups:
            b = group.num_requests
            kept = cache_NSKD.index_select(0, group.pages).view(b, -1, 2, kv_heads, dim)
            k, v = kept[:, :, 0].transpose(1, 2), kept[:, :, 1].transpose(1, 2)  # [B, K, L, D]
            q = q_THD if group.tokens is None else q_THD.index_select(0, group.tokens)
            part = _grouped(q.view(b, group.count, heads, dim), k, v, group.mask, scale)
            out = _collect(out, part, group, q_THD)
        assert out is not None
        return out

    def mla(self, q_THC: torch.Tensor, cache_NSC: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
        heads, dim = q_THC.shape[1], q_THC.shape[2]
        out = None
        for group in self.groups:
            b = group.num_requests
            kept = cache_NSC.index_select(0, group.pages).view(b, 1, -1, dim)
            q = q_THC if group.tokens is None else q_THC.index_select(0, group.tokens)
            part = _grouped(q.view(b, group.count, heads, dim), kept, kept[..., :value_dim], group.mask, scale)
            out = _collect(out, part, group, q_THC)
        assert out is not None
        return out


def _grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of q [B, n, H, D] to k, v [B, K, L, .]: [B * n, H, Dv]. Keys are never repeated for their G queries."""
    b, n, heads, dim = q.shape
    if v.shape[-1] != dim:
        return _latent(q, k, v, mask, scale)
    kv_heads = k.shape[1]
    g = heads // kv_heads
    if n == 1:  # the G query heads of a KV head stand along the query dim
        q = q.view(b, kv_heads, g, dim)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).reshape(b, heads, -1)
    assert b == 1, "rows of several positions are attended one request at a time"
    q = q.view(n, kv_heads, g, dim).permute(1, 2, 0, 3)  # KV heads along the batch dim, so that one mask serves all
    k, v = (x.transpose(0, 1).expand(-1, g, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(n, heads, -1)


def _latent(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The same where all heads share one key and the values are narrower, which the library's kernel does not take.

    Some heads at a time, so that scores never take more than `MOST_SCORES` values (or what one head needs).
    """
    b, n, heads, _ = q.shape
    keys = k.transpose(-1, -2)
    step = max(1, MOST_SCORES // (b * n * k.shape[2]))
    parts = []
    for first in range(0, heads, step):
        scores = torch.matmul(q[:, :, first : first + step].transpose(1, 2), keys).float().mul_(scale)
        if mask is not None:
            scores += mask
        parts.append(torch.matmul(scores.softmax(-1).to(q.dtype), v))
    return torch.cat(parts, dim=1).transpose(1, 2).reshape(b * n, heads, -1)


def _collect(out: torch.Tensor | None, part: torch.Tensor, group: Group, q: torch.Tensor) -> torch.Tensor:
    if group.tokens is None:
        return part
    if out is None:
        out = part.new_empty(q.shape[0], *part.shape[1:])
    return out.index_copy_(0, group.tokens, part)
