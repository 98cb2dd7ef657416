"""From a plan's rows to tensors: positions, token ids, cache slots and what attention needs.

Shapes: R rows, T tokens of the step, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.attention import Group, TorchAttention
from headrace.layers.batch import Batch, LayerCaches
from headrace.step import Int32Array
from headrace.worker.mirror import Mirror
from headrace.worker.transfer import upload

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

    @cached_property
    def positions(self) -> IntArray:
        """[T]"""
        return np.arange(self.num_tokens) - np.repeat(self.offsets - self.starts, self.counts)

    def kept_at(self, mirror: Mirror, page_size: int) -> IntArray:
        """[T] where each token's keys and values are kept: page id * page size + offset."""
        pages = mirror.page_table[np.repeat(self.slots, self.counts), self.positions // page_size].astype(np.int64)
        kept: IntArray = pages * page_size + self.positions % page_size
        return kept


def make_batch(
    plan_id: int,
    rows: Rows,
    mirror: Mirror,
    cache: LayerCaches,
    page_size: int,
    device: torch.device,
    tokens: torch.Tensor | None,
) -> Batch:
    """The step's tensors for the reference attention. `tokens` is given on the first stage (see `gather_tokens`)."""
    slots = upload(rows.kept_at(mirror, page_size), device)
    attention = TorchAttention(tuple(_groups(rows, mirror, page_size, device)))
    return Batch(plan_id, tokens, upload(rows.positions, device), slots, attention, cache)


def gather_tokens(rows: Rows, mirror: Mirror, last_token: torch.Tensor) -> torch.Tensor:
    """[T] ids: known tokens from the mirror, sampled ones from `last_token` [slots], where the feedback put them."""
    device = last_token.device
    known_rows = rows.starts < mirror.known[rows.slots]
    if not known_rows.any():
        return last_token.index_select(0, upload(rows.slots, device))
    ids = np.zeros(rows.num_tokens, dtype=np.int64)
    for r in np.flatnonzero(known_rows).tolist():
        known = mirror.tokens[rows.slots[r]]
        assert known is not None
        start, count, offset = int(rows.starts[r]), int(rows.counts[r]), int(rows.offsets[r])
        ids[offset : offset + count] = known[start : start + count]
    out = upload(ids, device)
    sampled = np.flatnonzero(~known_rows)
    if len(sampled):
        source = upload(rows.slots[sampled], device)
        out[upload(rows.offsets[sampled], device)] = last_token.index_select(0, source)
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
    tokens = None if everything else upload(rows.offsets[members], device)
    return Group(tokens, 1, upload(pages.reshape(-1), device), len(members), mask)


def _chunk_group(rows: Rows, r: int, mirror: Mirror, page_size: int, device: torch.device) -> Group:
    start, count, offset = int(rows.starts[r]), int(rows.counts[r]), int(rows.offsets[r])
    num_pages = -(-(start + count) // page_size)
    pages = mirror.page_table[rows.slots[r], :num_pages].astype(np.int64)
    outside = np.arange(num_pages * page_size)[None, :] > np.arange(start, start + count)[:, None]
    tokens = None if len(rows.slots) == 1 else torch.arange(offset, offset + count, device=device)
    return Group(tokens, count, upload(pages, device), 1, _additive(outside, device)[None, None])


def _additive(outside: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    mask = torch.zeros(outside.shape, dtype=torch.float32, device=device)
    return mask.masked_fill_(upload(outside, device), float("-inf"))
