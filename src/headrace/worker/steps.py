"""How a rank computes a step: eagerly, whatever its rows are. CUDA graphs are in `worker.graphs`.

Shapes: R rows, T tokens of the step, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace.kernels.attention import Attention, Expansion
from headrace.kernels.flashinfer import Planner
from headrace.kernels.paged import PagedAttention
from headrace.layers.batch import Batch
from headrace.layers.decoder import Decoder
from headrace.plan.reserve import EXPAND_MOST, EXPAND_PAIRS
from headrace.worker.batch import Rows, gather_tokens, make_batch
from headrace.worker.cache import KVCache
from headrace.worker.mirror import Mirror
from headrace.worker.transfer import upload


@dataclass(frozen=True)
class Outcome:
    """What a step left on the device."""

    hidden: torch.Tensor
    """[T, D]"""
    logits: torch.Tensor | None = None
    """[R, V] of the rows that sample, on the last stage."""
    best: torch.Tensor | None = None
    """[2, R] their best tokens and whether their logits are sound, where that is known already."""
    lent: bool = False
    """Whether all of it is overwritten by what the stream is given for the next step."""


class Steps(Protocol):
    """Computes a stage's share of a plan."""

    backend: str
    """What it runs on, for reports."""

    def stage(self, rows: Rows) -> None:
        """Bring to the device what the step needs beside its input: before the stream waits for that."""
        ...

    def run(self, plan_id: int, rows: Rows, hidden: torch.Tensor | None) -> Outcome:
        """One step. `hidden` [T, D] comes from the stage before; None on the first."""
        ...


@dataclass
class DeviceState:
    """What steps read and nobody sends along: tokens, page tables and the count of steps, on the device."""

    last_token: torch.Tensor
    """[slots + 1] int64: the token that each slot sampled last; the one past the end is what pads write to."""
    page_table: torch.Tensor | None
    """[slots, pages] int32, where kernels follow it themselves."""
    counter: torch.Tensor | None
    """[1] int64: steps so far, where routing is drawn."""

    @classmethod
    def make(
        cls, num_slots: int, max_pages: int, device: torch.device, *, paged: bool, counter: torch.Tensor | None
    ) -> DeviceState:
        """All zero."""
        table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device) if paged else None
        return cls(torch.zeros(num_slots + 1, dtype=torch.int64, device=device), table, counter)

    def take_pages(self, mirror: Mirror) -> None:
        """Copy what the last plan changed in the mirror's page table."""
        if self.page_table is None or not len(mirror.changed):
            return
        slots, indices = mirror.changed.T
        update = np.stack((slots * self.page_table.shape[1] + indices, mirror.page_table[slots, indices]))
        where, pages = upload(update, self.page_table.device)
        self.page_table.view(-1).index_copy_(0, where, pages.to(torch.int32))


class EagerSteps:
    """Launches every operation of the step from the host."""

    def __init__(
        self,
        model: Decoder,
        mirror: Mirror,
        cache: KVCache,
        state: DeviceState,
        page_size: int,
        max_len: int,
        device: torch.device,
        planner: Planner | None = None,
    ) -> None:
        """Attention is the planner's; without one that of the state's page table, without that the reference's."""
        self._model, self._mirror, self._cache, self._state = model, mirror, cache, state
        self._page_size, self._max_len, self._device = page_size, max_len, device
        self._latent = model.has_latent_cache
        self._planner = planner
        self.backend = "torch" if state.page_table is None else "triton"
        if planner is not None:
            self.backend = "flashinfer"

    def stage(self, rows: Rows) -> None:
        """Nothing: what it needs follows from what it finds."""

    def run(self, plan_id: int, rows: Rows, hidden: torch.Tensor | None) -> Outcome:
        """One step."""
        if self._state.counter is not None:
            self._state.counter.add_(1)
        tokens = gather_tokens(rows, self._mirror, self._state.last_token) if hidden is None else None
        x = tokens if hidden is None else hidden
        assert x is not None
        x_TD = self._model(x, self._batch(plan_id, rows, tokens))
        if self._model.head is None or not rows.samples.any():
            return Outcome(x_TD)
        wanted = rows.last_tokens[rows.samples]
        every = len(wanted) == x_TD.shape[0]
        return Outcome(x_TD, self._model.logits(x_TD if every else x_TD.index_select(0, upload(wanted, self._device))))

    def _batch(self, plan_id: int, rows: Rows, tokens: torch.Tensor | None) -> Batch:
        if self._state.page_table is None and self._planner is None:
            return make_batch(plan_id, rows, self._mirror, self._cache, self._page_size, self._device, tokens)
        tokens64 = np.stack((rows.positions, rows.kept_at(self._mirror, self._page_size)))
        positions, slots = upload(tokens64, self._device)
        return Batch(plan_id, tokens, positions, slots, self._attention(rows), self._cache)

    def _attention(self, rows: Rows) -> Attention:
        chunks = np.flatnonzero(rows.counts != 1)
        num_decodes = int(chunks[0]) if len(chunks) else len(rows.slots)
        expansion = self._expansion(rows, num_decodes) if self._latent else None
        if self._planner is not None:
            table = self._mirror.page_table
            return self._planner.plan(rows.slots, rows.starts, rows.counts, table, num_decodes, expansion)
        packed = np.stack((rows.slots, rows.starts, rows.counts, rows.offsets)).astype(np.int32)
        row_slot, row_start, row_count, row_offset = upload(packed, self._device)
        assert self._state.page_table is not None
        return PagedAttention(
            row_slot,
            row_start,
            row_count,
            row_offset,
            page_table=self._state.page_table,
            num_decodes=num_decodes,
            max_count=int(rows.counts.max()),
            max_len=self._max_len,
            expansion=expansion,
        )

    def _expansion(self, rows: Rows, num_decodes: int) -> Expansion | None:
        """The chunks' keys and values, where making them pays and they fit in what was measured for them."""
        counts, starts = rows.counts[num_decodes:], rows.starts[num_decodes:]
        lengths = starts + counts
        total = int(lengths.sum())
        pairs = int((counts * (2 * lengths - counts + 1) // 2).sum())
        if not 0 < total <= EXPAND_MOST or pairs < EXPAND_PAIRS * total:
            return None
        kv_offset = np.cumsum(lengths) - lengths
        of = np.repeat(rows.slots[num_decodes:], lengths)
        positions = np.arange(total) - np.repeat(kv_offset, lengths)
        pages = self._mirror.page_table[of, positions // self._page_size].astype(np.int64)
        first = int(rows.offsets[num_decodes])
        packed = np.stack((rows.offsets[num_decodes:] - first, counts, kv_offset, lengths)).astype(np.int32)
        slots = upload(pages * self._page_size + positions % self._page_size, self._device)
        row_offset, row_count, kv_at, kv_len = upload(packed, self._device)
        return Expansion(first, slots, row_offset, row_count, kv_at, kv_len, int(counts.max()))
