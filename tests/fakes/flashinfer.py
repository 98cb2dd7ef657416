"""FlashInfer's paged wrappers by dense attention: the contract of 0.6.18, and every argument held to it.

A test makes it importable under the library's name: `monkeypatch.setitem(sys.modules, "flashinfer", fake)`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

TYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
LATENT = (512, 64)

mla = sys.modules[__name__]
"""The library keeps one of the wrappers there."""


@dataclass(frozen=True)
class _Plan:
    """What a wrapper was planned for, on the host."""

    q_starts: list[int]
    page_starts: list[int]
    pages: list[int]
    lengths: list[int]
    num_heads: int
    num_kv_heads: int
    dims: tuple[int, ...]
    page_size: int
    causal: bool
    scale: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        rows = len(self.lengths)
        assert rows > 0, "nothing to plan"
        for starts in (self.q_starts, self.page_starts):
            assert len(starts) == rows + 1 and starts[0] == 0 and starts == sorted(starts)
        assert len(self.pages) >= self.page_starts[-1]
        assert self.num_heads % self.num_kv_heads == 0 and self.scale > 0 and self.dtype in TYPES
        for row, length in enumerate(self.lengths):
            count = self.q_starts[row + 1] - self.q_starts[row]
            num_pages = self.page_starts[row + 1] - self.page_starts[row]
            assert 0 < count <= length and num_pages == -(-length // self.page_size)
            assert count == 1 or self.causal

    def run(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Attention of q [T, H, .] to keys and values [N, S, K, .]."""
        assert q.shape == (self.q_starts[-1], self.num_heads, keys.shape[-1])
        assert q.dtype == out.dtype == keys.dtype == values.dtype == self.dtype
        assert keys.shape[1:3] == values.shape[1:3] == (self.page_size, self.num_kv_heads)
        assert out.shape == (*q.shape[:2], values.shape[-1]) and out.is_contiguous()
        group = self.num_heads // self.num_kv_heads
        for row, length in enumerate(self.lengths):
            pages = self.pages[self.page_starts[row] : self.page_starts[row + 1]]
            k, v = (
                cache[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (keys, values)
            )
            tokens = slice(self.q_starts[row], self.q_starts[row + 1])
            scores = torch.einsum("thd,lhd->htl", q[tokens].double(), k) * self.scale
            if self.causal:  # a row's queries are the last of its context
                count = tokens.stop - tokens.start
                seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
                scores.masked_fill_(~seen, float("-inf"))
            out[tokens] = torch.einsum("htl,lhd->thd", scores.softmax(-1), v).to(out.dtype)
        return out


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.numel() >= 128 << 20
        self._plan: _Plan | None = None

    @property
    def planned(self) -> _Plan:
        assert self._plan is not None, "run before plan"
        return self._plan


class _Paged(_Wrapper):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer)
        assert kv_layout == "NHD"

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        assert keys.ndim == 4 and keys.stride() == values.stride() and keys.stride(-1) == q.stride(-1) == 1
        assert keys.shape[-1] == self.planned.dims[0]
        return self.planned.run(q, keys, values, out)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """One query a row."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_tensor_cores, "the other form takes some numbers of heads alone"

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:  # fmt: skip
        assert q_data_type == kv_data_type and head_dim in HEAD_DIMS
        starts, pages = _ints(indptr), _ints(indices)
        self._plan = _Plan(
            list(range(len(starts))), starts, pages, _lengths(starts, _ints(last_page_len), page_size), num_qo_heads,
            num_kv_heads, (head_dim,), page_size, False, sm_scale, q_data_type,
        )  # fmt: skip


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """Any number of queries a row."""

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool = False, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert q_data_type == kv_data_type and head_dim_qk in HEAD_DIMS
        starts, last = _ints(paged_kv_indptr), _ints(paged_kv_last_page_len)
        self._plan = _Plan(
            _ints(qo_indptr), starts, _ints(paged_kv_indices), _lengths(starts, last, page_size), num_qo_heads,
            num_kv_heads, (head_dim_qk,), page_size, causal, sm_scale, q_data_type,
        )  # fmt: skip


class BatchMLAPagedAttentionWrapper(_Wrapper):
    """All heads share one latent row a token."""

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert q_data_type == kv_data_type and (head_dim_ckv, head_dim_kpe) == LATENT
        # With others a causal tile that holds heads of two positions misses the last that the second one sees.
        assert not causal or num_heads in (1, 2, 4, 8, 16, 32, 64, 128)
        self._plan = _Plan(
            _ints(qo_indptr), _ints(kv_indptr), _ints(kv_indices), _ints(kv_len_arr), num_heads, 1,
            (head_dim_ckv, head_dim_kpe), page_size, causal, sm_scale, q_data_type,
        )  # fmt: skip

    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor, *,
        out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        for tensor in (q_nope, q_pe, ckv_cache, kpe_cache):
            assert tensor.ndim == 3 and tensor.stride(-1) == 1
        assert (q_nope.shape[-1], q_pe.shape[-1]) == (ckv_cache.shape[-1], kpe_cache.shape[-1]) == self.planned.dims
        keys = torch.cat((ckv_cache, kpe_cache), -1).unsqueeze(2)
        return self.planned.run(torch.cat((q_nope, q_pe), -1), keys, ckv_cache.unsqueeze(2), out)


def _ints(array: torch.Tensor) -> list[int]:
    """What a plan is made of: int32, in host memory."""
    assert array.dtype == torch.int32 and array.ndim == 1 and array.device.type == "cpu" and array.is_contiguous()
    return [int(value) for value in array]


def _lengths(page_starts: list[int], last: list[int], size: int) -> list[int]:
    assert all(1 <= one <= size for one in last) and len(page_starts) == len(last) + 1
    ends = zip(page_starts, page_starts[1:], last, strict=False)
    return [(end - start - 1) * size + one for start, end, one in ends]
