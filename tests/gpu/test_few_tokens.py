"""The CUDA C++ product for a few tokens against float64 on the same device, at once and from a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.few_tokens import MEASURED, MOST_TOKENS, TILES, Tiles, choose_tiles, few_tokens
from headrace.kernels.linear import CudaProduct, product_float, product_of

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
TABLE = [*MEASURED.values(), *(tiles for by_out in TILES.values() for _, tiles in by_out)]
SHIPPED = sorted({tiles for tiles in TABLE if tiles is not None})


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def error(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.shape == expected.shape
    return float((got.double() - expected).norm() / expected.norm())


def poisoned(tokens: int, out: int, dtype: torch.dtype) -> None:
    """What the allocator hands out next for the result holds NaN."""
    del_me = torch.full((tokens, out), torch.nan, device="cuda", dtype=dtype)
    del del_me


@pytest.mark.parametrize("tiles", [*SHIPPED, Tiles(2, 1, 4, 1, 2)], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 8, 13, 16, 31, 32])
def test_tiles(tiles: Tiles, tokens: int) -> None:
    for out, inner, bias in ((384, 7168, False), (2112, 1536, True), (40, 64, False), (1001, 704, True)):
        x, weight, b = randn(tokens, inner), randn(out, inner), randn(out) if bias else None
        wanted = ((BF16, 5e-3), (torch.float32, 1e-5)) if tokens == 13 else ((BF16, 5e-3),)
        for dtype, bound in wanted:
            poisoned(tokens, out, dtype)
            assert error(few_tokens(x, weight, b, tiles, dtype), x, weight, b) < bound


def test_rows_with_gaps() -> None:
    x, weight = randn(7, 512)[:, 64:384], randn(100, 1024)[:, 8:328]
    assert error(few_tokens(x, weight, None, Tiles(1, 1, 4, 1, 4)), x, weight) < 5e-3


def test_a_matrix_of_more_than_two_gigabytes() -> None:
    x, weight = randn(2, 7168), torch.empty(163840, 7168, device="cuda", dtype=BF16).normal_()
    y = few_tokens(x, weight, None, Tiles(1, 1, 8, 1, 4))
    assert error(y[:, -1000:], x, weight[-1000:]) < 5e-3
    assert error(y[:, :1000], x, weight[:1000]) < 5e-3


@pytest.mark.parametrize("tokens", [1, 16, 20, 33])
@pytest.mark.parametrize("out", [384, 4096])
def test_products_in_a_graph(tokens: int, out: int) -> None:
    assert tokens <= MOST_TOKENS or choose_tiles(tokens, out, 2048) is None
    x, weight, bias = randn(tokens, 2048), randn(out, 2048), randn(out)
    product = product_of(weight)
    assert isinstance(product, CudaProduct)
    product(x, bias), product_float(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, scores = product(x, bias), product_float(x, weight)
    x.normal_()
    y.fill_(torch.nan), scores.fill_(torch.nan)
    graph.replay()
    assert error(y, x, weight, bias) < 5e-3 and scores.dtype == torch.float32 and error(scores, x, weight) < 1e-5


def test_the_same_sum_every_time() -> None:
    x, weight = randn(3, 7168), randn(384, 7168)
    first = product_float(x, weight)
    assert all(torch.equal(first, product_float(x, weight)) for _ in range(20))


def test_what_the_kernel_does_not_take() -> None:
    weight = randn(64, 100)
    x = randn(3, 100)
    assert error(product_of(weight)(x, None), x, weight) < 5e-3
    assert error(product_float(x, weight), x, weight) < 1e-5
