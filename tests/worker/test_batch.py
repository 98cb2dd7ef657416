"""Rows become positions, token ids, cache slots and masks: checked against a plain loop, through real attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import TorchAttention
from headrace.kernels.kv_write import write_kv, write_latent
from headrace.step import ROW_WIDTH, Register, SamplerSpec, StepPlan, pack, unpack
from headrace.worker.batch import Rows, gather_tokens, make_batch
from headrace.worker.mirror import Mirror

CPU = torch.device("cpu")


class OneLayer:
    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages

    def layer(self, index: int) -> torch.Tensor:
        return self.pages


def rows_of(rows: list[tuple[int, int, int, int]]) -> Rows:
    return Rows.of(unpack(pack([value for row in rows for value in row]), ROW_WIDTH))


def test_tokens_come_from_the_registration_or_from_the_last_sample() -> None:
    mirror = Mirror(4, 8)
    mirror.apply(
        StepPlan(
            0, b"", [], [Register(2, pack([10, 11, 12]), 3, SamplerSpec()), Register(0, pack([20]), 1, SamplerSpec())]
        )
    )
    last = torch.tensor([100, 101, 102, 103])
    rows = rows_of([(0, 1, 1, 1), (2, 1, 2, 1)])
    assert gather_tokens(rows, mirror, last).tolist() == [100, 11, 12]
    assert gather_tokens(rows_of([(2, 3, 1, 1), (0, 4, 1, 1)]), mirror, last).tolist() == [102, 100]
    assert rows.last_tokens.tolist() == [0, 2]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), page_size=st.sampled_from([1, 3, 16]), mla=st.booleans())
def test_any_mix_of_rows_attends_to_its_own_past(data: st.DataObject, page_size: int, mla: bool) -> None:
    """Any rows of any requests, pages dealt at random: the same as attention over each request's contiguous past."""
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=5))
    heads, kv_heads, dim, value_dim = 4, 1 if mla else 2, 8, 6 if mla else 8
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    needed = [-(-(past + count) // page_size) for past, count in lengths]
    deal = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    mirror = Mirror(len(lengths), max(needed))
    shape = (dim,) if mla else (2, kv_heads, dim)
    cache = random(len(deal), page_size, *shape)
    pasts, expected, queries, news = [], [], [], []
    for slot, (past, count) in enumerate(lengths):
        pages = [deal.pop() for _ in range(needed[slot])]
        mirror.page_table[slot, : len(pages)] = pages
        history = random(past + count, *shape)
        for position in range(past):
            cache[pages[position // page_size], position % page_size] = history[position]
        pasts.append(history)
        queries.append(random(count, heads, dim))
        news.append(history[past:])
        for i in range(count):
            seen = history[: past + i + 1].double()
            keys = seen[:, None].expand(-1, heads, -1) if mla else seen[:, 0].repeat_interleave(heads // kv_heads, 1)
            values = keys[..., :value_dim] if mla else seen[:, 1].repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("hd,lhd->hl", queries[-1][i].double(), keys) * 0.3
            expected.append(torch.einsum("hl,lhv->hv", scores.softmax(-1), values))
    rows = rows_of([(slot, past, count, 1) for slot, (past, count) in enumerate(lengths)])
    batch = make_batch(0, rows, mirror, OneLayer(cache), page_size, CPU, None)
    q, new = torch.cat(queries), torch.cat(news)
    assert batch.positions.tolist() == [p + i for p, c in lengths for i in range(c)]
    if mla:
        write_latent(new, cache, batch.slots)
        out = batch.attention.mla(q, cache, value_dim, 0.3)
    else:
        write_kv(new[:, 0], new[:, 1], cache, batch.slots)
        out = batch.attention.gqa(q, cache, 0.3)
    torch.testing.assert_close(out, torch.stack(expected).float(), rtol=1e-4, atol=1e-5)


def test_rows_of_like_length_share_a_group_and_others_do_not() -> None:
    mirror = Mirror(8, 512)
    rows = rows_of([(0, 100, 1, 1), (1, 90, 1, 1), (2, 5000, 1, 1), (3, 0, 7, 1)])
    attention = make_batch(0, rows, mirror, OneLayer(torch.zeros(1)), 16, CPU, None).attention
    assert isinstance(attention, TorchAttention)
    assert sorted((g.num_requests, g.count) for g in attention.groups) == [(1, 1), (1, 7), (2, 1)]


def test_pad_entries_of_the_page_table_never_leak() -> None:
    """Garbage in pages that a request does not own changes nothing."""
    mirror = Mirror(2, 4)
    mirror.page_table[0, :1], mirror.page_table[1, :4] = [1], [2, 3, 4, 5]
    rows = rows_of([(0, 1, 1, 1), (1, 7, 1, 1)])
    cache = torch.randn(6, 2, 2, 1, 4)
    q = torch.randn(2, 1, 4)
    attention = make_batch(0, rows, mirror, OneLayer(cache), 2, CPU, None).attention
    before = attention.gqa(q, cache.clone(), 1.0)
    cache[0] = 1e30  # where pads of the table point
    assert torch.equal(attention.gqa(q, cache, 1.0), before)


@pytest.mark.parametrize("counts", [[1], [3], [1, 1], [2, 1]])
def test_rows_unpack(counts: list[int]) -> None:
    rows = rows_of([(i, 5, count, i % 2) for i, count in enumerate(counts)])
    assert rows.num_tokens == sum(counts)
    assert rows.offsets.tolist() == list(np.cumsum([0, *counts])[:-1])
    assert rows.samples.tolist() == [bool(i % 2) for i in range(len(counts))]
