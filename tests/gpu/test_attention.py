"""Paged attention on a device, against float64: every page size, padding, splits, replayed graphs, far pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.kernels import mla_hopper
from headrace.kernels.gqa_attention import gqa_decode, gqa_prefill, gqa_reference, gqa_splits
from headrace.kernels.mla_attention import (
    expanded_reference,
    mla_decode,
    mla_kernel,
    mla_prefill,
    mla_prefill_expanded,
    mla_reference,
    mla_splits,
)
from tests.kernels.paged_rows import Rows, error, make_rows, poison

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DECODE = [(3, 0, 1), (-1, 5, 1), (0, 1300, 1), (7, 63, 1), (2, 64, 1), (5, 127, 1), (-1, 0, 1), (6, 700, 1)]
MIXED = [(3, 0, 1), (-1, 5, 2), (0, 400, 90), (7, 0, 133), (2, 64, 1), (5, 513, 3)]
DIM, VALUE, SCALE = 576, 512, 192**-0.5


def dirty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Leave NaN in the memory that the next buffer of this shape gets."""
    torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def latent(rows: Rows, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, cache, and what the attention is; queries large enough that the weights differ."""
    q = torch.randn(rows.tokens, heads, DIM, device=DEVICE, dtype=torch.bfloat16) * 2
    cache = torch.randn(*rows.held.shape, DIM, device=DEVICE, dtype=torch.bfloat16)
    expected = mla_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, VALUE, SCALE)
    dirty(rows.tokens, heads, VALUE)
    return q, poison(cache, rows), expected


def grouped(rows: Rows, heads: int, kv_heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fused = torch.randn(rows.tokens, heads + 2 * kv_heads, dim, device=DEVICE, dtype=torch.bfloat16) * 2
    q = fused[:, :heads]
    cache = torch.randn(*rows.held.shape, 2, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    expected = gqa_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, dim**-0.5)
    dirty(rows.tokens, heads, dim)
    return q, poison(cache, rows), expected


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("splits", [1, 5, 40])
@pytest.mark.parametrize(("size", "heads"), [(1, 64), (3, 32), (16, 16), (64, 64), (64, 128), (16, 8)])
def test_latent_decode(size: int, heads: int, splits: int, portable: bool) -> None:
    torch.manual_seed(size * heads)
    rows = make_rows(DECODE, size, DEVICE)
    q, cache, expected = latent(rows, heads)
    hopper = None if not portable else False
    got = mla_kernel(q, cache, rows.slot, rows.start, None, None, rows.page_table, VALUE, SCALE, 1, splits, hopper)
    assert error(got, expected) < 1e-2
    assert not got[rows.padding].any()


@pytest.mark.parametrize("portable", [False, True])
def test_many_rows_of_one_part_and_of_several(portable: bool) -> None:
    torch.manual_seed(0)
    contexts = [0, 63, 255, 256, 257, 700, 1023, 1500] * 5
    rows = make_rows([(i if i % 11 else -1, n, 1) for i, n in enumerate(contexts)], 16, DEVICE, len(contexts))
    q, cache, expected = latent(rows, 64)
    for splits in (1, 4, 16):
        dirty(rows.tokens, 64, VALUE)
        hopper = False if portable else None
        got = mla_kernel(q, cache, rows.slot, rows.start, None, None, rows.page_table, VALUE, SCALE, 1, splits, hopper)
        assert error(got, expected) < 1e-2
        assert not got[rows.padding].any()


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("size", "heads"), [(1, 64), (3, 32), (64, 16)])
def test_latent_prefill(size: int, heads: int, splits: int, portable: bool) -> None:
    torch.manual_seed(size * heads)
    rows = make_rows(MIXED, size, DEVICE)
    q, cache, expected = latent(rows, heads)
    hopper = None if not portable else False
    got = mla_kernel(q, cache, *rows.arrays, rows.page_table, VALUE, SCALE, 133, splits, hopper)
    assert error(got, expected) < 1e-2
    assert not got[rows.padding].any()


@pytest.mark.parametrize("splits", [1, 7])
@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "dim"),
    [(1, 64, 8, 128), (3, 32, 4, 64), (16, 10, 2, 80), (64, 8, 8, 96), (64, 8, 2, 256), (16, 64, 1, 128)],
)
def test_grouped(size: int, heads: int, kv_heads: int, dim: int, splits: int) -> None:
    torch.manual_seed(size * heads)
    rows = make_rows(DECODE, size, DEVICE)
    q, cache, expected = grouped(rows, heads, kv_heads, dim)
    got = gqa_decode(q, cache, rows.slot, rows.start, rows.page_table, dim**-0.5, splits)
    assert error(got, expected) < 1e-2
    assert not got[rows.padding].any()
    rows = make_rows(MIXED, size, DEVICE)
    q, cache, expected = grouped(rows, heads, kv_heads, dim)
    got = gqa_prefill(q, cache, *rows.arrays, rows.page_table, dim**-0.5, 133, splits)
    assert error(got, expected) < 1e-2
    assert not got[rows.padding].any()


def test_float32_is_not_rounded() -> None:
    torch.manual_seed(0)
    rows = make_rows(MIXED, 16, DEVICE)
    q, cache = torch.randn(rows.tokens, 8, 64, device=DEVICE), torch.randn(*rows.held.shape, 2, 2, 64, device=DEVICE)
    expected = gqa_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, 0.125)
    assert error(gqa_prefill(q, cache, *rows.arrays, rows.page_table, 0.125, 133), expected) < 1e-5
    q, cache = torch.randn(rows.tokens, 4, 48, device=DEVICE), torch.randn(*rows.held.shape, 48, device=DEVICE)
    expected = mla_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, 32, 0.125)
    assert error(mla_prefill(q, cache, *rows.arrays, rows.page_table, 32, 0.125, 133), expected) < 1e-5


@pytest.mark.parametrize(("heads", "nope", "rope", "value"), [(4, 128, 64, 128), (3, 32, 16, 48)])
def test_expanded(heads: int, nope: int, rope: int, value: int) -> None:
    torch.manual_seed(heads)
    counts, lengths, bases = [1, 130, 700, 257], [900, 130, 1000, 300], [7, 1000, 1130, 2200]
    offsets = [0, 1, 131, 831]
    arrays = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (offsets, counts, bases, lengths)]
    make = {"device": DEVICE, "dtype": torch.bfloat16}
    q = torch.randn(sum(counts), heads, nope + rope, **make)  # type: ignore[call-overload]
    kv = torch.randn(2600, heads, nope + value, **make)  # type: ignore[call-overload]
    kept = torch.randn(2600, 64 + rope, **make)  # type: ignore[call-overload]
    views = kv[..., :nope], kept[:, 64:], kv[..., nope:]
    wide = views[0].double(), views[1].double(), views[2].double()
    offset, count, base, length = arrays
    expected = expanded_reference(q.double(), *wide, offset, count, base, length, 0.1)
    for x in (kv, kept):
        x[:7], x[907:1000], x[2500:] = (float("nan"),) * 3
    dirty(sum(counts), heads, value)
    got = mla_prefill_expanded(q, *views, offset, count, base, length, 0.1, max(counts))
    assert error(got, expected) < 1e-2


def replayed(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.mark.parametrize("heads", [64, 16])
def test_a_graph_replays_with_other_rows(heads: int) -> None:
    torch.manual_seed(heads)
    rows, others = make_rows(DECODE, 16, DEVICE), make_rows([(7, 1500 - 99 * i, 1) for i in range(8)], 16, DEVICE)
    q, cache, _ = latent(rows, heads)
    other_q, other_cache, expected = latent(others, heads)
    width = max(rows.page_table.shape[1], others.page_table.shape[1])
    table = torch.zeros(8, width, dtype=torch.int32, device=DEVICE)
    table[:, : rows.page_table.shape[1]] = rows.page_table
    splits = mla_splits(8, heads, 2048, torch.device(DEVICE, 0))
    held = torch.cat((cache, other_cache))
    slot, start = rows.slot.clone(), rows.start.clone()
    graph, out = replayed(lambda: mla_decode(q, held, slot, start, table, VALUE, SCALE, splits))
    table[:, : others.page_table.shape[1]] = others.page_table + len(cache)
    for to, source in ((q, other_q), (slot, others.slot), (start, others.start)):
        to.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    assert error(out, expected) < 1e-2


def test_pages_past_two_to_the_31_elements() -> None:
    size, pages = 64, 2**31 // (64 * DIM) + 64
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB")
    torch.manual_seed(0)
    rows = make_rows([(0, 700, 1), (3, 300, 1)], size, DEVICE)
    q, cache, expected = latent(rows, 64)
    far = torch.empty(pages, size, DIM, dtype=torch.bfloat16, device=DEVICE)
    far[-len(cache) :] = cache
    table = rows.page_table + (pages - len(cache))
    for hopper in (None, False):
        got = mla_kernel(q, far, rows.slot, rows.start, None, None, table, VALUE, SCALE, 1, 4, hopper)
        assert error(got, expected) < 1e-2


def test_the_published_shape_takes_the_fast_kernel_where_there_is_one() -> None:
    device = torch.device(DEVICE, 0)
    fast = mla_hopper.supports(device, torch.bfloat16, DIM, VALUE)
    assert fast == (torch.cuda.get_device_capability(device)[0] == 9)
    assert mla_splits(1, 64, 65536, device) > 32
    assert gqa_splits(1, 8, 65536, device) > 8
