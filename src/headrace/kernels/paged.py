"""Attention whose kernels follow the page table themselves: the step's rows on the device, any mix of lengths.

Shapes: R rows, T tokens, H query heads, D head dim, C latent and rope dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.attention import Expansion
from headrace.kernels.gqa_attention import gqa_decode, gqa_prefill, gqa_splits
from headrace.kernels.mla_attention import mla_decode, mla_prefill, mla_splits


@dataclass(frozen=True)
class PagedAttention:
    """What one step's rows attend to. The first `num_decodes` rows have one token each."""

    row_slot: torch.Tensor
    """[R] int32, a row's line of the page table; -1 for a pad."""
    row_start: torch.Tensor
    """[R] int32, its first position."""
    row_count: torch.Tensor
    """[R] int32, how many positions."""
    row_offset: torch.Tensor
    """[R] int32, its first token in the step."""
    page_table: torch.Tensor
    """[slots, pages] int32."""
    num_decodes: int
    max_count: int
    """No row has more positions."""
    max_len: int
    """No context is longer."""
    expansion: Expansion | None = None

    def gqa(self, q_THD: torch.Tensor, cache_NSKD: torch.Tensor, scale: float) -> torch.Tensor:
        """[T, H, D]"""
        n, kv_heads = self.num_decodes, cache_NSKD.shape[3]
        parts = []
        if n:
            splits = gqa_splits(n, kv_heads, self.max_len, q_THD.device)
            rows = self.row_slot[:n], self.row_start[:n]
            parts.append(gqa_decode(q_THD[:n], cache_NSKD, *rows, self.page_table, scale, splits))
        if n < len(self.row_slot):
            chunks = self._chunks()
            splits = gqa_splits(len(chunks[0]) * self.max_count, kv_heads, self.max_len, q_THD.device)
            parts.append(
                gqa_prefill(q_THD[n:], cache_NSKD, *chunks, self.page_table, scale, self.max_count, min(splits, 8))
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mla(self, q_THC: torch.Tensor, cache_NSC: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
        """[T, H, value_dim]"""
        n, heads = self.num_decodes, q_THC.shape[1]
        parts = []
        if n:
            splits = mla_splits(n, heads, self.max_len, q_THC.device)
            rows = self.row_slot[:n], self.row_start[:n]
            parts.append(mla_decode(q_THC[:n], cache_NSC, *rows, self.page_table, value_dim, scale, splits))
        if n < len(self.row_slot) and self.expansion is None:
            parts.append(
                mla_prefill(q_THC[n:], cache_NSC, *self._chunks(), self.page_table, value_dim, scale, self.max_count)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.num_decodes
        # A chunk's tokens are counted from the first that is no decode row's.
        return self.row_slot[n:], self.row_start[n:], self.row_count[n:], self.row_offset[n:] - n
