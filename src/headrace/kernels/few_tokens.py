"""The bf16 product for a few tokens: a stream of weights through tensor cores, in CUDA C++ (few_tokens.cu).

Shapes: T tokens, I input and O output dims; x_TI, weight_OI -> [T, O].
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from headrace.kernels import nvrtc
from headrace.kernels.device import limits

SOURCE = Path(__file__).with_suffix(".cu")
UNIT = 64
"""Columns that a warp takes at a time; I must be a multiple."""
MOST_TOKENS = 32
ALIGNMENT = 8
"""Elements in the 16 bytes that a lane loads."""
MAX_SMEM = 48 << 10


class Tiles(NamedTuple):
    """How one product is laid over the device."""

    blocks: int
    """Blocks of 16 weight rows a warp."""
    groups: int
    """Such groups of rows a CTA."""
    split: int
    """Warps of a CTA that share a row."""
    cluster: int
    """CTAs that share a row."""
    prefetch: int
    """Units held in registers."""

    @property
    def rows(self) -> int:
        """Weight rows a CTA."""
        return 16 * self.blocks * self.groups

    def smem(self, token_blocks: int) -> int:
        """Bytes of shared memory a CTA."""
        return self.split * token_blocks * 8 * (self.rows + 4) * 4


NARROW, SHORT, MIDDLE, TALL = 768, 3072, 5120, 1 << 62
TILES: dict[int, tuple[tuple[int, Tiles | None], ...]] = {
    8: (
        (NARROW, Tiles(1, 1, 4, 8, 4)),
        (SHORT, Tiles(1, 1, 8, 2, 4)),
        (MIDDLE, Tiles(1, 1, 4, 2, 4)),
        (TALL, Tiles(1, 1, 4, 1, 4)),
    ),
    16: (
        (NARROW, Tiles(1, 1, 4, 8, 4)),
        (SHORT, Tiles(1, 1, 8, 2, 4)),
        (MIDDLE, Tiles(1, 1, 4, 2, 4)),
        (TALL, Tiles(1, 2, 4, 1, 2)),
    ),
    32: ((NARROW, Tiles(1, 1, 4, 8, 4)), (SHORT, Tiles(1, 1, 4, 2, 4)), (TALL, None)),
}
"""Tiles by the most tokens and the most output dims that they are for; None: the library's product is faster."""


MEASURED: dict[tuple[int, int, int], Tiles | None] = {
    (8, 12288, 1536): Tiles(2, 1, 8, 1, 1),
    (16, 12288, 1536): Tiles(2, 2, 4, 1, 1),
    (16, 2112, 7168): Tiles(1, 1, 8, 2, 2),
    (32, 2112, 7168): None,
    (16, 7168, 8192): Tiles(1, 1, 4, 1, 4),
    (8, 4096, 7168): Tiles(1, 1, 8, 1, 4),
    (16, 4096, 7168): Tiles(1, 1, 8, 1, 4),
    (8, 7168, 2048): Tiles(1, 1, 8, 1, 2),
    (16, 7168, 2048): Tiles(2, 1, 8, 1, 1),
    (8, 163840, 7168): None,
    (16, 163840, 7168): None,
}
"""What was measured to be best for one shape on one H200, by (most tokens, O, I); it goes before `TILES`."""


@cache
def choose_tiles(tokens: int, out: int, inner: int, clusters: bool = True) -> Tiles | None:
    """The tiles for a product; None where `F.linear` is to be used. `clusters`: whether the device has them."""
    if inner % UNIT or not 0 < tokens <= MOST_TOKENS:
        return None
    key = min(most for most in TILES if tokens <= most)
    if (key, out, inner) in MEASURED:
        tiles = MEASURED[key, out, inner]
    else:
        tiles = next(tiles for most, tiles in TILES[key] if out <= most)
    return tiles if tiles is None or clusters else tiles._replace(cluster=1)


def has_clusters(device: torch.device) -> bool:
    """Whether CTAs of a device can read each other's shared memory."""
    return limits(device).capability >= (9, 0)


def product(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """x W^T (+ bias) of bf16 on CUDA, by whichever form is faster; `out_dtype` is bfloat16 or float32 (no bias)."""
    if x_TI.ndim == 2 and fits(x_TI, weight_OI):
        tiles = choose_tiles(x_TI.shape[0], *weight_OI.shape, has_clusters(x_TI.device))
        if tiles is not None:
            return few_tokens(x_TI, weight_OI, bias_O, tiles, out_dtype)
    if out_dtype == x_TI.dtype:
        return F.linear(x_TI, weight_OI, bias_O)
    assert bias_O is None
    return torch.mm(x_TI, weight_OI.t(), out_dtype=out_dtype)


def fits(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether types and alignment are what the kernel reads."""
    return (
        x_TI.dtype == weight_OI.dtype == torch.bfloat16
        and x_TI.stride(1) == weight_OI.stride(1) == 1
        and not (x_TI.stride(0) % ALIGNMENT or weight_OI.stride(0) % ALIGNMENT)
        and not (x_TI.data_ptr() % 16 or weight_OI.data_ptr() % 16)
    )


def few_tokens(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    tiles: Tiles,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x W^T (+ bias) in one launch of the CUDA C++ kernel."""
    (tokens, inner), out = x_TI.shape, weight_OI.shape[0]
    assert x_TI.is_cuda and weight_OI.device == x_TI.device and fits(x_TI, weight_OI)
    assert weight_OI.shape == (out, inner) and inner % UNIT == 0 and 0 < tokens <= MOST_TOKENS
    assert bias_O is None or (bias_O.shape == (out,) and bias_O.dtype == torch.bfloat16 and bias_O.is_contiguous())
    assert out_dtype in (torch.bfloat16, torch.float32)
    y_TO = torch.empty(tokens, out, dtype=out_dtype, device=x_TI.device)
    launch = nvrtc.kernel(SOURCE, "few_tokens", macros(tokens, tiles, out_dtype), x_TI.device.index)
    grid = (-(-out // tiles.rows) * tiles.cluster, 1, 1)
    strides = (x_TI.stride(0), weight_OI.stride(0))
    launch(
        grid,
        32 * tiles.split * tiles.groups,
        (x_TI, weight_OI, bias_O, y_TO, tokens, out, inner // UNIT, *strides),
        early=True,
    )
    return y_TO


@cache
def macros(tokens: int, tiles: Tiles, out_dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """What the source is compiled with."""
    token_blocks = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    assert tiles.smem(token_blocks) <= MAX_SMEM
    return nvrtc.defined(
        RB=tiles.blocks,
        WR=tiles.groups,
        KS=tiles.split,
        CK=tiles.cluster,
        PF=tiles.prefetch,
        NB=token_blocks,
        OUT32=int(out_dtype == torch.float32),
    )
