"""Decode steps as CUDA graphs: one a ladder size, captured before ready, replayed for plans of decode rows alone.

A graph holds the whole stage, from the token's lookup to the best token, and nothing that waits for another stage.
Shapes: B rows of a graph (one token each), D hidden, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.paged import PagedAttention
from headrace.kernels.sampling import argmax
from headrace.layers.batch import Batch
from headrace.layers.decoder import Decoder
from headrace.worker.batch import Rows
from headrace.worker.cache import KVCache
from headrace.worker.mirror import Mirror
from headrace.worker.steps import DeviceState, Outcome, Steps
from headrace.worker.transfer import stage

NUM_INPUTS = 5
"""Rows of a graph's inputs: positions, cache slots, whose tokens; page-table rows and starts, of 32 bits."""


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    outcome: Outcome


class GraphSteps:
    """Replays what was captured; what does not fit goes to `eager`."""

    def __init__(
        self,
        eager: Steps,
        model: Decoder,
        mirror: Mirror,
        cache: KVCache,
        state: DeviceState,
        *,
        sizes: tuple[int, ...],
        page_size: int,
        max_len: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert state.page_table is not None
        self._eager, self._model, self._mirror, self._cache, self._state = eager, model, mirror, cache, state
        self._sizes, self._page_size, self._max_len, self._device = sizes, page_size, max_len, device
        self.backend = f"{eager.backend}+graphs"
        most = sizes[-1]
        # One block, one copy a step.
        self._inputs = torch.zeros(NUM_INPUTS * most, dtype=torch.int64, device=device)
        self._ones = torch.ones(most, dtype=torch.int32, device=device)
        self._order = torch.arange(most, dtype=torch.int32, device=device)
        self._hidden = None if model.embedding is not None else torch.zeros(most, hidden, dtype=dtype, device=device)
        self._graphs: dict[int, _Graph] = {}
        self._staged = False
        self._past_end = state.last_token.shape[0] - 1
        self.num_bytes = 0
        """Device memory that the graphs took."""

    def capture(self) -> None:
        """Make every graph. All ranks of a stage do this at the same time, largest size first."""
        before = torch.cuda.mem_get_info(self._device)[0]
        pool = torch.cuda.graph_pool_handle()
        # Between the streams of what runs beside it, see `layers.build`.
        stream = torch.cuda.Stream(self._device, priority=-1)
        for size in reversed(self._sizes):
            self._clear(size)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(size)  # loads modules and fills caches, which a capture must not
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outcome = self._compute(size)
            self._graphs[size] = _Graph(graph, outcome)
        torch.cuda.synchronize(self._device)
        for size in self._sizes:
            self._clear(size)
            self._graphs[size].graph.replay()
        torch.cuda.synchronize(self._device)
        self.num_bytes = max(0, before - torch.cuda.mem_get_info(self._device)[0])

    def stage(self, rows: Rows) -> None:
        """Bring a graph's rows to the device. The replay before, which reads the last ones, is ahead in the stream."""
        self._staged = self._fits(rows)
        if not self._staged:
            return
        num = len(rows.slots)
        size = self._size(num)
        inputs = _pads(size, self._past_end)
        inputs[0, :num] = rows.starts
        inputs[1, :num] = rows.kept_at(self._mirror, self._page_size)
        inputs[2, :num] = rows.slots
        inputs[3].view(np.int32)[:num], inputs[4].view(np.int32)[:num] = rows.slots, rows.starts
        self._rows(size).copy_(stage(torch.from_numpy(inputs)), non_blocking=True)

    def run(self, plan_id: int, rows: Rows, hidden: torch.Tensor | None) -> Outcome:
        """One step, of the rows that were staged."""
        if not self._staged:
            return self._eager.run(plan_id, rows, hidden)
        num = len(rows.slots)
        if self._hidden is not None:
            assert hidden is not None
            self._hidden[:num].copy_(hidden)
        one = self._graphs[self._size(num)]
        one.graph.replay()
        out = one.outcome
        if out.logits is None or out.best is None:
            return Outcome(out.hidden[:num], lent=True)
        return Outcome(out.hidden[:num], out.logits[:num], out.best[:, :num], lent=True)

    def _size(self, num: int) -> int:
        """The least that so many rows fit in."""
        return self._sizes[bisect_left(self._sizes, num)]

    def _rows(self, size: int) -> torch.Tensor:
        """[NUM_INPUTS, size], contiguous: one copy fills it."""
        return self._inputs[: NUM_INPUTS * size].view(NUM_INPUTS, size)

    def _clear(self, size: int) -> None:
        """Pads alone. Sizes share the front of one block, so what another size left there means nothing to this one."""
        self._rows(size).copy_(torch.from_numpy(_pads(size, self._past_end)))

    def _fits(self, rows: Rows) -> bool:
        """Whether all rows decode from a sampled token, and all sample: the same answer on every rank."""
        return (
            0 < len(rows.slots) <= self._sizes[-1]
            and rows.num_tokens == len(rows.slots)
            and bool(rows.samples.all())
            and bool((rows.starts >= self._mirror.known[rows.slots]).all())
        )

    def _compute(self, size: int) -> Outcome:
        positions, slots, owners, *short = self._rows(size).unbind(0)
        row_slots, starts = (row.view(torch.int32)[:size] for row in short)
        state, model = self._state, self._model
        assert state.page_table is not None
        if state.counter is not None:
            state.counter.add_(1)
        attention = PagedAttention(
            row_slots,
            starts,
            self._ones[:size],
            self._order[:size],
            page_table=state.page_table,
            num_decodes=size,
            max_count=1,
            max_len=self._max_len,
        )
        tokens = None if self._hidden is not None else state.last_token.index_select(0, owners)
        x = tokens if self._hidden is None else self._hidden[:size]
        assert x is not None
        x_BD = model(x, Batch(0, tokens, positions, slots, attention, self._cache, padded=True))
        if model.head is None:
            return Outcome(x_BD)
        logits = model.logits(x_BD)
        return Outcome(x_BD, logits, argmax(logits))


def _pads(size: int, past_end: int) -> npt.NDArray[np.int64]:
    """[NUM_INPUTS, size], of rows that are none: of no length, kept nowhere, whose tokens nobody reads."""
    inputs = np.zeros((NUM_INPUTS, size), dtype=np.int64)
    inputs[1], inputs[2] = -1, past_end
    inputs[3].view(np.int32)[:size] = -1
    return inputs
