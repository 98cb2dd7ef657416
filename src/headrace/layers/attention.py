"""Attention layers: grouped-query, and multi-head latent with absorbed weights.

Shapes: T tokens, H local query heads, K local KV heads, D head dim; for MLA N nope, R rope, V value dims, C latent.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from headrace.kernels.attention import Expansion
from headrace.kernels.latent import absorb_query, expand_value, prepare_latent
from headrace.kernels.mla_attention import mla_prefill_expanded
from headrace.kernels.rotary import deinterleave, prepare_gqa, rotate
from headrace.layers.axis import Axis
from headrace.layers.batch import Batch
from headrace.layers.build import Build
from headrace.layers.linear import Linear, Part, RowLinear, shared, whole
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import Rope
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
        cache = batch.cache.layer(self.layer)
        q_THD = prepare_gqa(
            self.qkv(x_TD),
            self.num_heads,
            self.num_kv_heads,
            *rope,
            batch.positions,
            batch.slots,
            cache,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            0.0 if self.q_norm is None else self.q_norm.eps,
        )
        out_THD = batch.attention.gqa(q_THD, cache, self.spec.scale)
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
        self._kv_b: torch.Tensor | None = None

    def finalise(self) -> None:
        """Once loaded, take W_uk [H, N, C] and W_uv [H, C, V] out of kv_b [H * (N + V), C]."""
        spec = self.spec
        self._kv_b = self.kv_up.matrix()
        kv_b = self._kv_b.view(self.num_heads, spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self._absorbed = (kv_b[:, : spec.nope_dim], kv_b[:, spec.nope_dim :].transpose(1, 2))
        del self.kv_up  # never multiplied as it is

    def forward(self, x_TD: torch.Tensor, batch: Batch, rope: Rope) -> torch.Tensor:
        spec, heads = self.spec, self.num_heads
        assert self._absorbed is not None
        w_uk, w_uv = self._absorbed
        cache = batch.cache.layer(self.layer)
        q = prepare_latent(
            self.down(x_TD),
            None if self.q_norm is None else self.q_norm.weight,
            self.kv_norm.weight,
            self.kv_norm.eps,
            *rope,
            batch.positions,
            batch.slots,
            cache,
            self.interleaved,
        )
        if self.q_norm is not None:
            q = self.q_up(q)
        q_THQ = q.unflatten(-1, (heads, spec.qk_dim))
        expansion = batch.attention.expansion
        absorbed = len(x_TD) if expansion is None else expansion.first_token
        parts = []
        if absorbed:
            q_THC = absorb_query(q_THQ[:absorbed], w_uk, *rope, batch.positions[:absorbed], self.interleaved)
            parts.append(expand_value(batch.attention.mla(q_THC, cache, spec.kv_lora_rank, spec.scale), w_uv))
        if expansion is not None:
            parts.append(self._expanded(q_THQ[absorbed:], expansion, batch.positions[absorbed:], rope, cache))
        y: torch.Tensor = self.out(parts[0] if len(parts) == 1 else torch.cat(parts))
        return y

    def _expanded(
        self, q_THQ: torch.Tensor, chunks: Expansion, positions_T: torch.Tensor, rope: Rope, cache_NSC: torch.Tensor
    ) -> torch.Tensor:
        """[T, H * V] of chunks whose keys and values are made from the latents of their contexts."""
        spec = self.spec
        assert self._kv_b is not None
        latent_LC = cache_NSC.flatten(0, 1).index_select(0, chunks.slots)
        kept, shared_rope = latent_LC.split((spec.kv_lora_rank, spec.rope_dim), dim=-1)
        kv_LHX = linear(kept, self._kv_b).unflatten(-1, (self.num_heads, spec.nope_dim + spec.v_dim))
        k_LHN, v_LHV = kv_LHX.split((spec.nope_dim, spec.v_dim), dim=-1)
        q_rope = q_THQ[..., spec.nope_dim :]
        q_rope = deinterleave(q_rope) if self.interleaved else q_rope
        cos, sin = (table.index_select(0, positions_T) for table in rope)
        q_THQ = torch.cat((q_THQ[..., : spec.nope_dim], rotate(q_rope, cos, sin)), dim=-1)
        rows = chunks.row_offset, chunks.row_count, chunks.kv_offset, chunks.kv_len
        return mla_prefill_expanded(q_THQ, k_LHN, shared_rope, v_LHV, *rows, spec.scale, chunks.max_count).flatten(1)
