"""Attention over a paged KV cache: the seam that layers call, and its PyTorch reference.

Shapes: T tokens of the step, H query heads, K KV heads, G = H / K, D head dim, C latent dims, N pages, S page size,
B requests of a group, P pages a request, L = P * S positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class Attention(Protocol):
    """What one step's rows attend to. Made once a step, used by every layer of the stage."""

    def gqa(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache_NSKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write k and v, attend: [T, H, D]. cache: [N, S, 2, K, D]."""
        ...

    def mla(
        self, q_THC: torch.Tensor, latent_TC: torch.Tensor, cache_NSC: torch.Tensor, value_dim: int, scale: float
    ) -> torch.Tensor:
        """Write the latent rows, attend with their first `value_dim` dims as values: [T, H, value_dim]."""
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

    slots: torch.Tensor
    """[T] where each token's keys and values are kept: page id * page size + offset."""
    groups: tuple[Group, ...]

    def gqa(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache_NSKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        flat = cache_NSKD.flatten(0, 1)
        flat[:, 0].index_copy_(0, self.slots, k_TKD)
        flat[:, 1].index_copy_(0, self.slots, v_TKD)
        heads, kv_heads, dim = q_THD.shape[1], k_TKD.shape[1], q_THD.shape[2]
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

    def mla(
        self, q_THC: torch.Tensor, latent_TC: torch.Tensor, cache_NSC: torch.Tensor, value_dim: int, scale: float
    ) -> torch.Tensor:
        cache_NSC.flatten(0, 1).index_copy_(0, self.slots, latent_TC)
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
    """Attention of q [B, n, H, D] to k, v [B, K, L, .]: [B * n, H, Dv].

    The G query heads of a KV head stand along the query dim, so that keys are never repeated.
    """
    b, n, heads, dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    g = heads // kv_heads
    q = q.view(b, n, kv_heads, g, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, g * n, dim)
    if mask is not None and n > 1:
        mask = mask.expand(b, 1, n, length).repeat(1, 1, g, 1)
    if v.shape[-1] == dim:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:  # MLA: values narrower than keys, which the fused kernel does not take
        scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
        if mask is not None:
            scores = scores + mask
        out = torch.matmul(scores.softmax(-1).to(q.dtype), v)
    return out.view(b, kv_heads, g, n, -1).permute(0, 3, 1, 2, 4).reshape(b * n, heads, -1)


def _collect(out: torch.Tensor | None, part: torch.Tensor, group: Group, q: torch.Tensor) -> torch.Tensor:
    if group.tokens is None:
        return part
    if out is None:
        out = part.new_empty(q.shape[0], *part.shape[1:])
    return out.index_copy_(0, group.tokens, part)
