"""Attention by FlashInfer, where that library is installed: a step is planned on the host once, for all layers.

Shapes: R rows, T tokens of the step, H local query heads, K local KV heads, D head dim, C latent and rope dims,
V value dims, N pages, S page size. The library's contract is that of flashinfer-python 0.6.18
(https://docs.flashinfer.ai, Apache-2.0).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.attention import Expansion
from headrace.kernels.attention_tiles import num_sms

IntArray = npt.NDArray[np.integer[Any]]
Call = Callable[[Any, torch.Tensor, torch.Tensor], None]

LEAST_WORKSPACE = 128 << 20
"""Bytes for parts of contexts that are merged: what the library recommends."""
WIDE = 256
"""Head dim from which on a tile of the library's has 64 (position, head) pairs, below up to 128."""


@dataclass(frozen=True)
class Shape:
    """A rank's attention layers, which are all alike."""

    num_heads: int
    num_kv_heads: int
    """1 where all heads share one row a token."""
    dim: int
    """D, or C of a latent cache."""
    value_dim: int
    """D, or V of a latent cache: the first dims of its rows."""
    scale: float
    page_size: int
    dtype: torch.dtype

    @property
    def latent(self) -> bool:
        """Whether the cache keeps latent rows."""
        return self.value_dim != self.dim


@dataclass(frozen=True)
class Part:
    """Rows of a step that one planned wrapper computes."""

    wrapper: Any
    first: int
    """Their first token in the step."""
    count: int
    """How many tokens of the step, pads included."""
    tokens: torch.Tensor | None
    """[.] int64 those that are no pads, where there are pads; None: all."""


@dataclass(frozen=True)
class FlashInferAttention:
    """What one step's rows attend to."""

    shape: Shape
    parts: tuple[Part, ...]
    """Tokens of no part are pads, and give zeros."""
    padded: bool
    expansion: Expansion | None = None

    def gqa(self, q_THD: torch.Tensor, cache_NSKD: torch.Tensor, scale: float) -> torch.Tensor:
        """[T, H, D]"""
        shape = self.shape
        assert cache_NSKD.shape[1:] == (shape.page_size, 2, shape.num_kv_heads, shape.dim) and not shape.latent
        kv = cache_NSKD[:, :, 0], cache_NSKD[:, :, 1]

        def call(wrapper: Any, q: torch.Tensor, out: torch.Tensor) -> None:
            wrapper.run(q, kv, out=out)

        return self._run(q_THD, scale, call)

    def mla(self, q_THC: torch.Tensor, cache_NSC: torch.Tensor, value_dim: int, scale: float) -> torch.Tensor:
        """[T, H, V]"""
        shape = self.shape
        assert cache_NSC.shape[1:] == (shape.page_size, shape.dim) and value_dim == shape.value_dim and shape.latent
        kept, rope = cache_NSC[..., :value_dim], cache_NSC[..., value_dim:]

        def call(wrapper: Any, q: torch.Tensor, out: torch.Tensor) -> None:
            wrapper.run(q[..., :value_dim], q[..., value_dim:], kept, rope, out=out)

        return self._run(q_THC, scale, call)

    def _run(self, q: torch.Tensor, scale: float, call: Call) -> torch.Tensor:
        shape = self.shape
        assert q.shape[1:] == (shape.num_heads, shape.dim) and q.dtype == shape.dtype and scale == shape.scale
        make = q.new_zeros if self.padded else q.new_empty
        out = make(q.shape[0], shape.num_heads, shape.value_dim)
        for part in self.parts:
            if part.tokens is None:
                tokens = slice(part.first, part.first + part.count)
                call(part.wrapper, q[tokens], out[tokens])
                continue
            some = q.new_empty(len(part.tokens), *out.shape[1:])
            call(part.wrapper, q.index_select(0, part.tokens), some)
            out.index_copy_(0, part.tokens, some)
        return out


@dataclass
class _Turn:
    """What plans one step at a time: the library writes a plan to memory of its wrapper."""

    decode: Any
    chunks: Any
    taken: torch.cuda.Event | None = None
    """When the device has copied the last plan from the host, which the next one overwrites there."""


class Planner:
    """Plans a rank's steps. Up to `depth` of them may wait for the device before the host waits for it."""

    def __init__(self, shape: Shape, device: torch.device, depth: int) -> None:
        """Make the wrappers and, where there are none yet, their kernels. Raises what the library raises."""
        self._shape, self._device = shape, device
        library = importlib.import_module("flashinfer")
        # One for all: the stream's order keeps those that use it apart. The library wants it zero at first.
        workspace = torch.zeros(workspace_bytes(shape, device), dtype=torch.uint8, device=device)
        self._turns = [_make_turn(library, workspace, shape) for _ in range(depth)]
        self._next = 0
        table = np.zeros((1, 2), dtype=np.int32)  # long enough for two positions, whatever the page size
        self.plan(np.array([0, 0]), np.array([0, 0]), np.array([1, 2]), table, 1)

    def plan(
        self,
        slots: IntArray,
        starts: IntArray,
        counts: IntArray,
        page_table: IntArray,
        num_decodes: int,
        expansion: Expansion | None = None,
    ) -> FlashInferAttention:
        """Plan a step of rows [R], of which the first `num_decodes` have one token each; slot -1 is a pad.

        page_table: [slots, pages]. expansion: the rows after those, where `mla` is not asked for them.
        The attention is valid until `depth` more steps have been planned, for the stream that is current now.
        """
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        if turn.taken is not None:
            turn.taken.synchronize()
        rows = (slots, starts, counts)
        last = len(slots) if expansion is None else num_decodes
        decode = self._part(turn.decode, rows, range(num_decodes), page_table, causal=False)
        chunks = self._part(turn.chunks, rows, range(num_decodes, last), page_table, causal=True)
        if self._device.type == "cuda":
            turn.taken = torch.cuda.Event()
            turn.taken.record()
        parts = tuple(part for part in (decode, chunks) if part is not None)
        return FlashInferAttention(self._shape, parts, bool((slots[:last] < 0).any()), expansion)

    def _part(
        self,
        wrapper: Any,
        rows: tuple[IntArray, IntArray, IntArray],
        which: range,
        page_table: IntArray,
        *,
        causal: bool,
    ) -> Part | None:
        """The rows of `which` that are no pads; None: there is none."""
        slots, starts, counts = (array[which.start : which.stop] for array in rows)
        real = slots >= 0
        if not real.any():
            return None
        shape, size = self._shape, self._shape.page_size
        first = int(rows[2][: which.start].sum())
        lengths = (starts + counts)[real]
        num_pages = -(-lengths // size)
        indptr = _ends(num_pages)
        nth = np.arange(indptr[-1]) - np.repeat(indptr[:-1], num_pages)
        indices = page_table[np.repeat(slots[real], num_pages), nth]
        kv_indptr, kv_indices, q_indptr = (self._host(array) for array in (indptr, indices, _ends(counts[real])))
        types = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype}
        if shape.latent:
            dims = shape.value_dim, shape.dim - shape.value_dim
            lens = self._host(lengths)
            wrapper.plan(
                q_indptr, kv_indptr, kv_indices, lens, shape.num_heads, *dims, size, causal, shape.scale, **types
            )
        else:
            last_lens = self._host(lengths - (num_pages - 1) * size)
            heads = shape.num_heads, shape.num_kv_heads, shape.dim, size
            if causal:
                wrapper.plan(
                    q_indptr, kv_indptr, kv_indices, last_lens, *heads, causal=True, sm_scale=shape.scale, **types
                )
            else:
                wrapper.plan(kv_indptr, kv_indices, last_lens, *heads, sm_scale=shape.scale, **types)
        if real.all():
            return Part(wrapper, first, int(counts.sum()), None)
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(real, counts)) + first)
        return Part(wrapper, first, int(counts.sum()), self._pinned(tokens).to(self._device, non_blocking=True))

    def _host(self, array: IntArray) -> torch.Tensor:
        """In host memory, where plans are made; pinned, so that the library's copies of it do not wait."""
        return self._pinned(torch.from_numpy(array.astype(np.int32)))

    def _pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory() if self._device.type == "cuda" else host


def workspace_bytes(shape: Shape, device: torch.device) -> int:
    """Bytes for the float32 outputs, and their sums' logarithms, of contexts computed in parts.

    The library makes at most two parts a multiprocessor and KV head, each of one tile.
    """
    pairs = 64 if shape.dim >= WIDE else 128
    group = shape.num_heads // shape.num_kv_heads
    # A latent cache takes less: 128 pairs a multiprocessor at most, whatever the heads.
    parts = 0 if shape.latent else 2 * num_sms(device) * group * pairs
    return max(LEAST_WORKSPACE, parts * (shape.dim + 1) * 4 + (1 << 20))


def _make_turn(library: Any, workspace: torch.Tensor, shape: Shape) -> _Turn:
    if shape.latent:
        return _Turn(*(library.mla.BatchMLAPagedAttentionWrapper(workspace) for _ in range(2)))
    return _Turn(
        # The form without tensor cores takes some numbers of heads a KV head alone.
        library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True),
        library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"),
    )


def _ends(counts: IntArray) -> IntArray:
    """[R + 1] where each row begins, and the end."""
    return np.concatenate(([0], np.cumsum(counts)))
