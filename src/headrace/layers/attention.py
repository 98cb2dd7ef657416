"""Attention layers: grouped-query, and multi-head latent with absorbed weights.

Shapes: T tokens, H local query heads, K local KV heads, D head dim; for MLA N nope, R rope, V value dims, C latent.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.layers.axis import Axis
from headrace.layers.batch import Batch
from headrace.layers.build import Build
from headrace.layers.linear import Linear, Part, RowLinear, shared, whole
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rope, deinterleave, rotate
from headrace.spec import GqaSpec, Int4Spec, MlaSpec

LATENT_EPS = 1e-6
"""Of the norms inside MLA, in the published models and in `transformers`, whatever rms_norm_eps the config names."""


def kv_heads_at(spec: GqaSpec, axis: Axis) -> range:
    """The KV heads a rank holds: its share, or one that several ranks hold when there are fewer heads than ranks."""
    if axis.size <= spec.num_kv_heads:
        return axis.share(spec.num_kv_heads)
    head = axis.index * spec.num_kv_heads // axis.size
    return range(head, head + 1)


class GqaAttention(nn.Module):
    """Fused q, k, v; optional q/k norm; rope; paged attention; output projection summed over the tensor axis."""

    def __init__(
        self, build: Build, layer: int, spec: GqaSpec, int4: Int4Spec | None, out_int4: Int4Spec | None
    ) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        hidden, dim, axis = build.spec.hidden, spec.head_dim, build.tensor
        kv = kv_heads_at(spec, axis)
        kv_rows = range(kv.start * dim, kv.stop * dim)
        self.num_heads, self.num_kv_heads = spec.num_heads // axis.size, len(kv)
        parts = [
            shared("q", spec.num_heads * dim, axis),
            Part("k", spec.num_kv_heads * dim, kv_rows),
            Part("v", spec.num_kv_heads * dim, kv_rows),
        ]
        self.qkv = Linear(build, hidden, parts, bias=spec.qkv_bias, int4=int4)
        self.q_norm = RMSNorm(build, dim) if spec.qk_norm else None
        self.k_norm = RMSNorm(build, dim) if spec.qk_norm else None
        self.out = RowLinear(build, spec.num_heads * dim, whole("out", hidden), axis, bias=spec.out_bias, int4=out_int4)

    def forward(self, x_TD: torch.Tensor, batch: Batch, rope: Rope) -> torch.Tensor:
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.spec.head_dim
        qkv = self.qkv(x_TD).view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])), dim=1)
        qk = rotate(qk, rope)
        cache = batch.cache.layer(self.layer)
        out_THD = batch.attention.gqa(qk[:, :heads], qk[:, heads:], v, cache, self.spec.scale)
        y: torch.Tensor = self.out(out_THD.flatten(1))
        return y


class MlaAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), weights absorbed.

    The cache holds one row a token: the normalised latent and the rotated key part that all heads share. Queries are
    taken into the latent space (W_uk), outputs out of it (W_uv), so keys and values are never expanded.
    """

    def __init__(
        self, build: Build, layer: int, spec: MlaSpec, *, in_int4: Int4Spec | None, q_int4: Int4Spec | None,
        kv_int4: Int4Spec | None, out_int4: Int4Spec | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer, self.spec = layer, spec
        self.interleaved = build.spec.rope.interleaved
        hidden, axis, rank = build.spec.hidden, build.tensor, spec.kv_lora_rank
        self.num_heads = spec.num_heads // axis.size
        q_out = spec.num_heads * spec.qk_dim
        latent = whole("kv_a", rank + spec.rope_dim)
        if spec.q_lora_rank is None:
            self.down = Linear(build, hidden, [shared("q", q_out, axis), latent], int4=in_int4)
            self.q_norm = None
        else:
            self.down = Linear(build, hidden, [whole("q_a", spec.q_lora_rank), latent], int4=in_int4)
            self.q_norm = RMSNorm(build, spec.q_lora_rank, eps=LATENT_EPS)
            self.q_up = Linear(build, spec.q_lora_rank, [shared("q_b", q_out, axis)], int4=q_int4)
        self.kv_norm = RMSNorm(build, rank, eps=LATENT_EPS)
        self.kv_up = Linear(
            build, rank, [shared("kv_b", spec.num_heads * (spec.nope_dim + spec.v_dim), axis)], int4=kv_int4
        )
        self.out = RowLinear(build, spec.num_heads * spec.v_dim, whole("out", hidden), axis, int4=out_int4)
        self._absorbed: tuple[torch.Tensor, torch.Tensor] | None = None

    def finalise(self) -> None:
        """Once loaded, take W_uk [H, N, C] and W_uv [H, C, V] out of kv_b."""
        spec = self.spec
        kv_b = self.kv_up.matrix().view(self.num_heads, spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self._absorbed = (kv_b[:, : spec.nope_dim], kv_b[:, spec.nope_dim :].transpose(1, 2))
        del self.kv_up  # never multiplied as it is

    def forward(self, x_TD: torch.Tensor, batch: Batch, rope: Rope) -> torch.Tensor:
        spec, heads = self.spec, self.num_heads
        assert self._absorbed is not None
        w_uk, w_uv = self._absorbed
        q, latent = self.down(x_TD).split(self.down.sizes, dim=-1)
        if self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q_nope, q_rope = q.view(-1, heads, spec.qk_dim).split((spec.nope_dim, spec.rope_dim), dim=-1)
        latent, k_rope = latent.split((spec.kv_lora_rank, spec.rope_dim), dim=-1)
        shared_rope = torch.cat((q_rope, k_rope.unsqueeze(1)), dim=1)
        if self.interleaved:
            shared_rope = deinterleave(shared_rope)
        shared_rope = rotate(shared_rope, rope)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        q_THC = torch.cat((q_latent, shared_rope[:, :heads]), dim=-1)
        kept_TC = torch.cat((self.kv_norm(latent), shared_rope[:, heads]), dim=-1)
        cache = batch.cache.layer(self.layer)
        out_THC = batch.attention.mla(q_THC, kept_TC, cache, spec.kv_lora_rank, spec.scale)
        y: torch.Tensor = self.out(torch.bmm(out_THC.transpose(0, 1), w_uv).transpose(0, 1).flatten(1))
        return y
