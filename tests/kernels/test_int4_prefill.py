"""INT4 experts for prefill: the reference, and the CUDA source itself run on a CPU thread by thread."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import Fragments
from headrace.kernels.int4_prefill import SOURCE, Tile, down, gate_up, tile_for
from headrace.weights.formats import dequantise, unpack_int4
from tests.kernels.emulated import emulated, needs_compiler
from tests.kernels.test_int4_experts import blocks_of


def fragments_of(experts: int, rows: int, columns: int) -> tuple[Fragments, torch.Tensor]:
    """Random weights, written to fragment order nibble by nibble, and the same as bf16 matrices [X, N, K]."""
    generator = torch.Generator().manual_seed(rows + columns)
    packed = torch.randint(-(1 << 31), 1 << 31, (experts, rows, columns // 8), generator=generator).to(torch.int32)
    scale = (torch.rand(experts, rows, columns // 32, generator=generator) * 0.02 + 0.001).bfloat16()
    stored = (unpack_int4(packed).long() + 8).view(experts, rows // 16, 16, columns // 64, 64)
    words = torch.zeros(experts, rows // 16, columns // 64, 32, 4, dtype=torch.long)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for j in range(4):
            c = 32 * (j // 2) + 8 * t + 4 * (j % 2)
            for nibble, (row, column) in enumerate([(0, 0), (8, 0), (0, 2), (8, 2), (0, 1), (8, 1), (0, 3), (8, 3)]):
                words[:, :, :, lane, j] |= stored[:, :, g + row, :, c + column] << (4 * nibble)
    scales = scale.view(experts, rows // 16, 2, 8, columns // 64, 2).permute(0, 1, 4, 3, 2, 5).contiguous()
    matrices = torch.stack([dequantise(p, s, torch.bfloat16) for p, s in zip(packed, scale, strict=True)])
    return Fragments(words.to(torch.int32), scales), matrices


def expected(x: torch.Tensor, ids: torch.Tensor, held: range, matrices: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """float64 at pair index, NaN where no held expert was chosen."""
    width = matrices.shape[1] // (2 if gated else 1)
    out = torch.full((ids.numel(), width), float("nan"), dtype=torch.float64)
    share = ids.numel() // x.shape[0]
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert in held:
            y = matrices[expert - held.start].double() @ x[pair // share].double()
            out[pair] = F.silu(y[:width]) * y[width:] if gated else y
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    chosen = ~want.isnan()
    return float((got.double()[chosen] - want[chosen]).norm() / want[chosen].norm())


def choices(tokens: int, experts: int, k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])


@pytest.mark.parametrize("held", [range(6), range(2, 5)])
def test_reference(held: range) -> None:
    ids = choices(40, 6, 2)
    plan = blocks_of(ids, held, 32)
    stack, matrices = fragments_of(len(held), 64, 128)
    x, inner = torch.randn(40, 128), torch.randn(80, 128)
    assert error(gate_up(x, plan, stack), expected(x, ids, held, matrices, gated=True)) < 1e-2
    assert error(down(inner, plan, stack), expected(inner, ids, held, matrices, gated=False)) < 1e-2


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
@pytest.mark.parametrize("block", [1, 16, 40, 64, 128])
def test_every_device_has_a_tile(capability: tuple[int, int], block: int) -> None:
    smem = {(8, 0): 166_912, (8, 6): 101_376, (9, 0): 232_448, (12, 0): 101_376}[capability]
    tile = tile_for(capability, smem, block)
    assert tile is not None
    assert tile.block >= block
    assert tile.hopper == (capability == (9, 0))
    assert tile.smem(False) <= smem
    assert tile.stages >= 3


def test_blocks_that_no_tile_serves() -> None:
    assert tile_for((9, 0), 232_448, 193) is None
    assert tile_for((7, 5), 20_000, 64) is None


def emulate(x: torch.Tensor, plan: ExpertPlan, stack: Fragments, tile: Tile, grid: int, *, gated: bool) -> torch.Tensor:
    """What the kernel writes, over NaN; its copies stay inside their arrays and on their alignment."""
    width = stack.rows // (2 if gated else 1)
    out = torch.full((plan.rows.shape[0], width), float("nan"), dtype=torch.bfloat16)

    def memory(tensor: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    sized = [(memory(t), ctypes.c_size_t(t.nbytes)) for t in (x, stack.words, stack.scales, out)]
    run = emulated("int4_prefill_emulated.cpp", SOURCE, tile.macros(gated)).emulate
    run.restype = ctypes.c_long
    tiles = tile.tiles(gated, stack.rows)
    bad = run(
        min(grid, plan.block_expert.shape[0] * tiles), *(value for pair in sized for value in pair), memory(plan.rows),
        *(memory(t) for t in (plan.block_expert, plan.block_first, plan.block_count, plan.num_blocks)),
        plan.rows.shape[0] // x.shape[0], width // 16, stack.columns // 64, tiles,
    )  # fmt: skip
    assert bad != -1, "threads wait for each other"
    assert bad == 0
    return out


# (tile, gated, rows of the weights, columns, CTAs, tokens): stages fewer, as many and more than steps; row tiles that
# are full and not; blocks full, odd and of one pair; CTAs with one item and with several.
EMULATED = [
    (Tile(True, 48, 4, 2, 16), True, 2 * 144, 64 * 9, 2, 30),
    (Tile(True, 48, 4, 2, 16), True, 32, 64, 9, 12),
    (Tile(True, 64, 3, 1, 32), False, 272, 64 * 3, 3, 40),
    (Tile(True, 64, 3, 1, 32), False, 256, 64 * 4, 99, 40),
    (Tile(False, 32, 3), True, 2 * 144, 64 * 7, 99, 30),
    (Tile(False, 32, 3), True, 32, 64, 2, 12),
    (Tile(False, 64, 4), False, 272, 64 * 3, 99, 40),
    (Tile(False, 64, 4), False, 256, 64 * 2, 5, 40),
]


@needs_compiler
@pytest.mark.parametrize(("tile", "gated", "rows", "columns", "grid", "tokens"), EMULATED)
def test_source_on_a_cpu(tile: Tile, gated: bool, rows: int, columns: int, grid: int, tokens: int) -> None:
    held = range(1, 4)
    ids = choices(tokens, 5, 3)
    ids[0] = torch.tensor([0, 4, 1])
    plan = blocks_of(ids, held, tile.block)
    stack, matrices = fragments_of(len(held), rows, columns)
    x = torch.randn(tokens * (1 if gated else 3), columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = emulate(x, plan, stack, tile, grid, gated=gated)
    want = expected(x, ids, held, matrices, gated=gated)
    assert torch.equal(got.isnan(), want.isnan())
    assert error(got, want) < 4e-3
