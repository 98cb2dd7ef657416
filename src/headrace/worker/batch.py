"""From a plan's rows to tensors: positions, token ids, cache slots and attention groups.

Shapes: R rows, T tokens of the step, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.attention import Group, TorchAttention
from headrace.layers.batch import Batch, LayerCaches
from headrace.step import Int32Array
from headrace.worker.mirror import Mirror

IntArray = npt.NDArray[np.int64]

MIN_BUCKET = 4
"""Pages under which decode rows are never told apart by length."""


@dataclass(frozen=True)
class Rows:
    """A plan's rows, unpacked once."""

    slots: IntArray
    starts: IntArray
    counts: IntArray
    samples: npt.NDArray[np.bool_]
    offsets: IntArray
    """[R] index of each row's first token in the step."""
    num_tokens: int

    @classmethod
    def of(cls, packed: Int32Array) -> Rows:
        """From [R, ROW_WIDTH]."""
        slots, starts, counts, samples = packed.T.astype(np.int64)
        ends = np.cumsum(counts)
        return cls(slots, starts, counts, samples.astype(bool), ends - counts, int(ends[-1]) if len(ends) else 0)

    @property
    def last_tokens(self) -> IntArray:
        """[R] index of each row's last token in the step."""
        return self.offsets + self.counts - 1


def make_batch(
    plan_id: int,
    rows: Rows,
    mirror: Mirror,
    cache: LayerCaches,
    page_size: int,
    device: torch.device,
    tokens: torch.Tensor | None,
) -> Batch:
    """The step's tensors. `tokens` is given on the first stage (see `gather_tokens`)."""
    row_of = np.repeat(np.arange(len(rows.slots)), rows.counts)
    positions = np.arange(rows.num_tokens) - np.repeat(rows.offsets - rows.starts, rows.counts)
    pages = mirror.page_table[rows.slots[row_of], positions // page_size].astype(np.int64)
    kept_at = pages * page_size + positions % page_size
    attention = TorchAttention(torch.from_numpy(kept_at).to(device), tuple(_groups(rows, mirror, page_size, device)))
    return Batch(plan_id, tokens, torch.from_numpy(positions).to(device), attention, cache)


def gather_tokens(rows: Rows, mirror: Mirror, last_token: torch.Tensor) -> torch.Tensor:
    """[T] ids: known tokens from the mirror, sampled ones from `last_token` [slots], where the feedback put them."""
    known_rows = rows.starts < mirror.known[rows.slots]
    if not known_rows.any():
        return last_token.index_select(0, torch.from_numpy(rows.slots).to(last_token.device))
    ids = np.zeros(rows.num_tokens, dtype=np.int64)
    for r in np.flatnonzero(known_rows).tolist():
        known = mirror.tokens[rows.slots[r]]
        assert known is not None
        start, count, offset = int(rows.starts[r]), int(rows.counts[r]), int(rows.offsets[r])
        ids[offset : offset + count] = known[start : start + count]
    out = torch.from_numpy(ids).to(last_token.device)
    sampled = np.flatnonzero(~known_rows)
    if len(sampled):
        source = torch.from_numpy(rows.slots[sampled]).to(last_token.device)
        out[torch.from_numpy(rows.offsets[sampled]).to(last_token.device)] = last_token.index_select(0, source)
    return out


def _groups(rows: Rows, mirror: Mirror, page_size: int, device: torch.device) -> list[Group]:
    """One-token rows together by length, the others one by one."""
    single = np.flatnonzero(rows.counts == 1)
    groups = []
    if len(single):
        num_pages = -(-(rows.starts[single] + 1) // page_size)
        # Rows are padded to the longest of their group: lengths within a factor of two share one.
        bucket = np.ceil(np.log2(np.maximum(num_pages, MIN_BUCKET))).astype(np.int64)
        kinds = np.unique(bucket)
        for kind in kinds.tolist():
            members = single[bucket == kind]
            everything = len(kinds) == 1 and len(single) == len(rows.slots)
            groups.append(_decode_group(rows, members, mirror, page_size, device, everything))
    for r in np.flatnonzero(rows.counts > 1).tolist():
        groups.append(_chunk_group(rows, r, mirror, page_size, device))
    return groups


def _decode_group(
    rows: Rows, members: IntArray, mirror: Mirror, page_size: int, device: torch.device, everything: bool
) -> Group:
    lengths = rows.starts[members] + 1
    num_pages = int(-(-lengths.max() // page_size))
    pages = mirror.page_table[rows.slots[members], :num_pages].astype(np.int64)
    mask = None
    if (lengths != num_pages * page_size).any():
        outside = np.arange(num_pages * page_size)[None, :] >= lengths[:, None]
        mask = _additive(outside, device)[:, None, None, :]
    tokens = None if everything else torch.from_numpy(rows.offsets[members]).to(device)
    return Group(tokens, 1, torch.from_numpy(pages.reshape(-1)).to(device), len(members), mask)


def _chunk_group(rows: Rows, r: int, mirror: Mirror, page_size: int, device: torch.device) -> Group:
    start, count, offset = int(rows.starts[r]), int(rows.counts[r]), int(rows.offsets[r])
    num_pages = -(-(start + count) // page_size)
    pages = mirror.page_table[rows.slots[r], :num_pages].astype(np.int64)
    outside = np.arange(num_pages * page_size)[None, :] > np.arange(start, start + count)[:, None]
    tokens = None if len(rows.slots) == 1 else torch.arange(offset, offset + count, device=device)
    return Group(tokens, count, torch.from_numpy(pages).to(device), 1, _additive(outside, device)[None, None])


def _additive(outside: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    mask = torch.zeros(outside.shape, dtype=torch.float32)
    mask.masked_fill_(torch.from_numpy(outside), float("-inf"))
    return mask.to(device)
