"""Products of many tokens with their INT4 experts (prefill): weights in fragment order, dequantised in registers.

Shapes: T tokens, k choices a token, P = T*k pairs, R rows of x, B blocks of pairs, X experts; a stack is [N, K] an
expert, D hidden, I intermediate; O is what a pair gets: I after gate and up, D after down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from headrace.kernels.device import limits as limits
from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import COLUMNS, ROWS, Fragments, fits, product_reference
from headrace.kernels.nvrtc import Kernel, defined, kernel

SOURCE = Path(__file__).with_suffix(".cu")
BLOCK, WIDE_BLOCK = 128, 192
"""Pairs of a block that a plan for these products should have (see `block_for`); fewer are right as well."""
_WIDE_FROM = 128.0
"""Pairs an expert from which on the wide block is 11% faster; at half as many it is 25% slower (one H200)."""

_ITEM_COLUMNS = 256  # weight rows of a CTA
_FRAGMENT_BYTES = _ITEM_COLUMNS * COLUMNS // 2 + _ITEM_COLUMNS * COLUMNS // 32 * 2
_MOST_STAGES = 8


@dataclass(frozen=True)
class Tile:
    """How a launch is cut; the macros of the source file say what each means."""

    hopper: bool
    block: int = BLOCK
    stages: int = _MOST_STAGES
    lag: int = 4
    nstep: int = 16

    @property
    def name(self) -> str:
        """For tables."""
        return f"{'wgmma' if self.hopper else 'mma'},{self.block},s{self.stages},l{self.lag},n{self.nstep}"

    @property
    def threads(self) -> int:
        """Of one CTA."""
        return 384 if self.hopper else 256

    def smem(self, gated: bool) -> int:
        """Dynamic shared memory: alignment, stages, barriers, pairs, two buffers of staged output a group."""
        groups = 2 if self.hopper else 1
        width = _ITEM_COLUMNS // (2 if gated else 1) // groups
        out = groups * 2 * 16 * (width * 2 + 16)
        stage = self.block * COLUMNS * 2 + _FRAGMENT_BYTES
        return 1024 + self.stages * (stage + 16) + groups * self.block * 4 + out

    def macros(self, gated: bool) -> tuple[tuple[str, int], ...]:
        """What the source file is compiled with."""
        return defined(
            GATED=int(gated),
            HOPPER=int(self.hopper),
            BLOCK=self.block,
            STAGES=self.stages,
            LAG=self.lag,
            NSTEP=self.nstep,
        )

    @staticmethod
    def tiles(gated: bool, rows: int) -> int:
        """Items of one block."""
        return -(-rows // _ITEM_COLUMNS) if not gated else -(-(rows // 2) // (_ITEM_COLUMNS // 2))


def tile_for(capability: tuple[int, int], smem: int, block: int) -> Tile | None:
    """The tile for blocks of so many pairs on a device with `smem` bytes a CTA; None where none can serve."""
    hopper = capability == (9, 0)
    tokens = max(16, -(-block // 16) * 16)
    if tokens > BLOCK:
        wide = Tile(True, WIDE_BLOCK, stages=6, lag=3, nstep=96)
        return wide if hopper and tokens <= WIDE_BLOCK and wide.smem(True) <= smem else None
    for stages in range(_MOST_STAGES if hopper else 4, 2, -1):
        tile = Tile(hopper, tokens, stages, max(1, stages // 2))
        if max(tile.smem(True), tile.smem(False)) <= smem and (not hopper or tile.lag <= stages - 2):
            return tile
    return None


def block_for(pairs_each: float, device: torch.device) -> int:
    """Most pairs of a block where an expert has `pairs_each` on average."""
    return WIDE_BLOCK if pairs_each >= _WIDE_FROM and limits(device).capability == (9, 0) else BLOCK


def gate_up(x_TD: torch.Tensor, plan: ExpertPlan, stack: Fragments) -> torch.Tensor:
    """silu(gate) * up of every pair's expert and token: [P, I] at pair index.

    The stack's rows are gate, then up. Rows of pairs that are not in the plan are undefined.
    """
    return _product(x_TD, plan, stack, gated=True)


def down(inner_PI: torch.Tensor, plan: ExpertPlan, stack: Fragments) -> torch.Tensor:
    """Every pair's product with its expert: [P, D] at pair index; rows of pairs not in the plan are undefined."""
    assert inner_PI.shape[0] == plan.rows.shape[0], (inner_PI.shape, plan.rows.shape)
    return _product(inner_PI, plan, stack, gated=False)


def _product(x_RK: torch.Tensor, plan: ExpertPlan, stack: Fragments, *, gated: bool) -> torch.Tensor:
    if x_RK.is_cuda and x_RK.dtype == torch.bfloat16:
        device = limits(x_RK.device)
        tile = tile_for(device.capability, device.smem, plan.block)
        if tile is not None:
            return product_cuda(x_RK, plan, stack, tile, gated=gated)
    return product_reference(x_RK, plan, stack, gated=gated)


def product_cuda(x_RK: torch.Tensor, plan: ExpertPlan, stack: Fragments, tile: Tile, *, gated: bool) -> torch.Tensor:
    """One launch with a given tile; bf16 on CUDA."""
    pairs, columns = plan.rows.shape[0], stack.columns
    assert x_RK.dtype == torch.bfloat16 and x_RK.is_contiguous() and x_RK.shape[1] == columns, (x_RK.shape, columns)
    assert stack.words.is_contiguous() and stack.scales.is_contiguous()
    assert fits(stack.rows, columns, 2 if gated else 1), (stack.rows, columns)
    assert plan.block <= tile.block, (plan.block, tile)
    assert all(t.data_ptr() % 16 == 0 for t in (x_RK, stack.words, stack.scales))
    for tensor in (plan.rows, plan.block_expert, plan.block_first, plan.block_count, plan.num_blocks):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device == x_RK.device
    assert max(stack.words.numel() // 4, x_RK.numel() // 8) < 1 << 32  # the kernel counts pieces of 16 bytes in 32 bits
    choices = pairs // max(1, x_RK.shape[0])
    assert pairs == choices * x_RK.shape[0], (pairs, x_RK.shape)
    width = stack.rows // 2 if gated else stack.rows
    out_PO = torch.empty(pairs, width, dtype=x_RK.dtype, device=x_RK.device)
    tiles = tile.tiles(gated, stack.rows)
    grid = plan.block_expert.shape[0] * tiles
    if tile.hopper:  # every CTA takes several items
        grid = min(grid, limits(x_RK.device).multiprocessors)
    tensors = (x_RK, stack.words, stack.scales, out_PO, plan.rows, plan.block_expert, plan.block_first)
    sizes = (choices, width // ROWS, columns // COLUMNS, tiles)
    launch = _compiled(tile, gated, x_RK.device.index)
    launch((grid, 1, 1), tile.threads, (*tensors, plan.block_count, plan.num_blocks, *sizes), tile.smem(gated))
    return out_PO


@cache
def _compiled(tile: Tile, gated: bool, device_index: int) -> Kernel:
    return kernel(SOURCE, "int4_prefill", tile.macros(gated), device_index)
