"""The CUDA C++ product for a few tokens, emulated thread by thread on the CPU, and what chooses it."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import few_tokens
from headrace.kernels.few_tokens import MEASURED, TILES, Tiles, choose_tiles
from headrace.kernels.linear import product_float
from tests.kernels.emulated import emulated, needs_compiler


@needs_compiler
@pytest.mark.parametrize(
    ("tiles", "tokens", "rows", "inner", "dtype"),
    [
        (Tiles(1, 1, 2, 1, 2), 5, 21, 320, torch.bfloat16),
        (Tiles(2, 1, 2, 2, 1), 13, 40, 192, torch.float32),
        (Tiles(1, 2, 1, 2, 3), 1, 33, 64, torch.bfloat16),
    ],
)
def test_every_thread_reads_multiplies_and_adds_what_it_should(
    tiles: Tiles, tokens: int, rows: int, inner: int, dtype: torch.dtype
) -> None:
    library = emulated("few_tokens_on_cpu.cpp", few_tokens.SOURCE, few_tokens.macros(tokens, tiles, dtype))
    # Rows of x and of the weight lie apart, and what lies between them must not matter.
    x_TI = torch.full((tokens, inner + 8), torch.nan, dtype=torch.bfloat16)[:, :inner].copy_(torch.randn(tokens, inner))
    weight_OI = torch.full((rows, inner + 16), torch.nan, dtype=torch.bfloat16)[:, :inner]
    weight_OI.copy_(torch.randn(rows, inner))
    bias_O = torch.randn(rows).bfloat16() if dtype == torch.bfloat16 else None
    y_TO = torch.full((tokens + 1, rows), torch.nan, dtype=dtype)
    pointers = [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in (x_TI, weight_OI, bias_O, y_TO)]
    sizes = (tokens, rows, inner // 64, x_TI.stride(0), weight_OI.stride(0))
    library.run(*pointers, *map(ctypes.c_int, sizes))
    expected = F.linear(x_TI.double(), weight_OI.double(), None if bias_O is None else bias_O.double())
    error = (y_TO[:tokens].double() - expected).norm() / expected.norm()
    assert error < (5e-3 if dtype == torch.bfloat16 else 1e-5)
    assert bool(y_TO[tokens].isnan().all()), "a row of a token that is not there was written"


def test_tiles_of_every_size_fit() -> None:
    table = [(most, tiles) for most, by_out in TILES.items() for _, tiles in by_out]
    for most, tiles in [*table, *((key[0], tiles) for key, tiles in MEASURED.items())]:
        if tiles is not None:
            assert few_tokens.macros(most, tiles, torch.bfloat16)
            assert 32 * tiles.split * tiles.groups <= 512 and tiles.cluster <= 8


def test_what_the_kernel_does_not_read_is_left_to_the_library() -> None:
    assert choose_tiles(1, 384, 7168) and choose_tiles(8, 7168, 2048)
    assert choose_tiles(8, 163840, 7168) is None  # the library's product is faster
    without = choose_tiles(1, 384, 7168, clusters=False)
    assert without is not None and without.cluster == 1
    assert choose_tiles(1, 384, 7168 + 32) is None
    assert choose_tiles(33, 384, 7168) is None
    assert choose_tiles(0, 384, 7168) is None
    x, weight = torch.randn(2, 129).bfloat16(), torch.randn(8, 128).bfloat16()
    assert few_tokens.fits(x[:, :128].contiguous(), weight)
    assert not few_tokens.fits(x[:, :128], weight)
    assert not few_tokens.fits(x[:, :128].contiguous().float(), weight)


def test_router_scores_are_float32() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    assert torch.equal(product_float(x, weight), F.linear(x.float(), weight.float()))
