"""Paged grouped-query attention: the reference against the library's, the kernel under the interpreter against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.attention_tiles import SHARED_SM90, SHARED_SM120, decode_splits, gqa_tiles, least_part, padded
from headrace.kernels.gqa_attention import gqa_decode, gqa_kernel, gqa_prefill, gqa_reference
from tests.kernels.paged_rows import Rows, error, make_rows, poison

DECODE = [(3, 0, 1), (-1, 5, 1), (0, 70, 1), (7, 63, 1)]
MIXED = [(3, 0, 1), (-1, 5, 2), (0, 40, 9), (7, 0, 18), (1, 64, 1)]


def inputs(rows: Rows, heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(rows.tokens, heads, dim)
    return q, torch.randn(*rows.held.shape, 2, kv_heads, dim)


def test_the_reference_is_causal_attention() -> None:
    torch.manual_seed(0)
    rows = make_rows([(2, 0, 7), (5, 0, 12)], 4)
    q, cache = inputs(rows, 4, 2, 16)
    got = gqa_reference(q, cache, *rows.arrays, rows.page_table, 0.25)
    first = 0
    for slot, count in ((2, 7), (5, 12)):
        kept = cache[rows.page_table[slot].long()].flatten(0, 1)[:count]
        k, v = (kept[:, i].transpose(0, 1).repeat_interleave(2, 0) for i in (0, 1))
        expected = F.scaled_dot_product_attention(
            q[first : first + count].transpose(0, 1), k, v, is_causal=True, scale=0.25
        )
        torch.testing.assert_close(got[first : first + count], expected.transpose(0, 1))
        first += count


def test_decode_is_prefill_of_one() -> None:
    torch.manual_seed(0)
    rows = make_rows(DECODE, 16)
    q, cache = inputs(rows, 4, 2, 16)
    poison(cache, rows)
    one = gqa_decode(q, cache, rows.slot, rows.start, rows.page_table, 0.3, 4)
    many = gqa_prefill(q, cache, *rows.arrays, rows.page_table, 0.3, 1)
    assert torch.equal(one, many)
    assert not one[rows.padding].any()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "dim", "splits", "least", "decode"),
    [
        (1, 2, 1, 16, 1, 1, True), (3, 3, 1, 24, 3, 16, True), (16, 2, 2, 80, 1, 1, True), (16, 2, 1, 16, 4, 64, True),
        (3, 2, 1, 24, 1, 1, False), (16, 3, 1, 16, 2, 16, False), (64, 4, 2, 32, 1, 1, False),
    ],
)  # fmt: skip
def test_rows_of_any_kind(
    size: int, heads: int, kv_heads: int, dim: int, splits: int, least: int, decode: bool
) -> None:
    torch.manual_seed(size)
    rows = make_rows(DECODE if decode else MIXED, size)
    q, cache = inputs(rows, heads, kv_heads, dim)
    expected = gqa_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, 0.3)
    count, offset, most = (None, None, 1) if decode else (rows.count, rows.offset, int(rows.count.max()))
    poison(cache, rows)
    out = torch.full_like(q, float("nan"))
    got = gqa_kernel(q, cache, rows.slot, rows.start, count, offset, rows.page_table, 0.3, most, splits, out, least)
    assert error(got, expected) < 1e-5
    assert not got[rows.padding].any()


@pytest.mark.parametrize(("limit", "element", "widest"), [(SHARED_SM90, 2, 256), (SHARED_SM90, 4, 256),
                                                          (SHARED_SM120, 2, 256), (SHARED_SM120, 4, 128)])  # fmt: skip
@pytest.mark.parametrize("queries", [1, 8, 24, 64, 4096])
def test_tiles_fit_the_device(limit: int, element: int, widest: int, queries: int) -> None:
    for dim in (64, 80, 96, 128, 256):
        if dim > widest:
            break
        tiles = gqa_tiles(limit, queries, dim, element)
        wide = padded(dim)
        assert tiles.shared_bytes(wide, 2 * wide, element) <= limit
        assert tiles.block_m <= max(16, padded(queries))


def test_a_few_long_rows_fill_the_device() -> None:
    assert decode_splits(1, 1, 65536, 132) > 60
    assert 3 <= decode_splits(32, 1, 65536, 132) <= 4
    assert decode_splits(256, 1, 1024, 132) == 1
    assert decode_splits(1, 1, 1, 132) == 1
    assert decode_splits(0, 1, 0, 132) == 1
    assert decode_splits(128, 1, 262144, 132) == 1, "no programs for parts that short rows do not have"
    assert max(decode_splits(r, b, n, 132) for r in (1, 5, 300) for b in (1, 8) for n in (10, 9999, 262144)) <= 128


def test_parts_grow_with_the_rows() -> None:
    assert [least_part(rows, 132) for rows in (1, 8, 16, 26, 32, 64, 128)] == [64, 64, 128, 128, 256, 256, 512]
    assert least_part(1, 1) == 512


@pytest.mark.interpreted
def test_single_tokens_and_chunks_fill_one_output() -> None:
    torch.manual_seed(0)
    rows = make_rows(MIXED, 16)
    q, cache = inputs(rows, 2, 1, 16)
    expected = gqa_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, 0.3)
    out = torch.full_like(q, float("nan"))
    for chosen, most, splits in ((rows.count == 1, 1, 3), (rows.count > 1, 18, 1)):
        slot, start, count, offset = (array[chosen] for array in rows.arrays)
        gqa_kernel(q, cache, slot, start, count, offset, rows.page_table, 0.3, most, splits, out, 16)
    assert error(out, expected) < 1e-5
