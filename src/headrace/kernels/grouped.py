"""The experts' products over a plan's blocks in Triton: plain weights, and INT4 as stored where nothing faster fits.

Shapes: T tokens, P pairs, X local experts, D hidden, I local intermediate; a weight is [X, rows, columns], gate rows
first, then up rows. INT4: packed int32 [X, rows, columns / 8], scale bf16 [X, rows, columns / 32].
In the kernel N weight rows are the product's M and a block of tokens its N, so that few tokens waste little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.activation import silu_mul
from headrace.kernels.device import limits
from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.jit import jit, tl, triton
from headrace.weights.formats import dequantise

GROUP = 32
"""Columns that share an INT4 scale."""


@dataclass(frozen=True)
class Tile:
    """How one product is cut."""

    rows: int
    """Weight rows of a program (of each of gate and up)."""
    columns: int
    """Columns of one step."""
    stages: int
    warps: int

    def smem(self, tokens: int, matrices: int, weight_bits: int = 16) -> int:
        """Bytes that the pipeline's buffers take."""
        return self.stages * self.columns * (matrices * self.rows * weight_bits // 8 + tokens * 2)


# Best first; the first that fits the device's shared memory runs.
_FEW = (Tile(64, 128, 4, 4), Tile(64, 64, 4, 4), Tile(64, 64, 2, 4))
_FEW_DOWN = (Tile(64, 128, 5, 4), Tile(64, 128, 3, 4), Tile(64, 64, 2, 4))
_SOME = (Tile(64, 64, 4, 4), Tile(64, 64, 3, 4), Tile(64, 32, 2, 4))
_MANY = (Tile(128, 64, 3, 8), Tile(64, 64, 3, 8), Tile(64, 64, 2, 8), Tile(64, 32, 2, 8))
_MANY_DOWN = (Tile(128, 64, 4, 8), Tile(128, 64, 2, 8), Tile(64, 32, 2, 4))
_FEW_INT4 = (Tile(64, 128, 4, 4), Tile(64, 64, 2, 4))
_MANY_INT4 = (Tile(128, 64, 4, 8), Tile(64, 64, 2, 8))


def tile_for(block: int, gated: bool, int4: bool, smem: int) -> Tile:
    """The tile for blocks of up to `block` tokens on a device with so much shared memory a block."""
    tiles: tuple[Tile, ...]
    if int4:
        tiles = _FEW_INT4 if block <= 32 else _MANY_INT4
    elif block <= 32:
        tiles = _FEW if gated else _FEW_DOWN
    elif block <= 64:
        tiles = _SOME
    else:
        tiles = _MANY if gated else _MANY_DOWN
    matrices = 2 if gated else 1
    for tile in tiles:
        # An eighth is left for what the compiler exchanges between layouts.
        if tile.smem(max(16, block), matrices, 4 if int4 else 16) <= smem * 7 // 8:
            return tile
    return tiles[-1]


def gate_up(x_TD: torch.Tensor, plan: ExpertPlan, weight_XOD: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of each planned pair, at the pair's index: [P, I]; other rows are left as they were allocated."""
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
        return launch_grouped(x_TD, plan, weight_XOD, None, gated=True)
    return grouped_reference(x_TD, plan, weight_XOD, gated=True)


def down(inner_PI: torch.Tensor, plan: ExpertPlan, weight_XDI: torch.Tensor) -> torch.Tensor:
    """Each planned pair's row times its expert's weight, at the pair's index: [P, D]."""
    if inner_PI.is_cuda and inner_PI.dtype == torch.bfloat16:
        return launch_grouped(inner_PI, plan, weight_XDI, None, gated=False)
    return grouped_reference(inner_PI, plan, weight_XDI, gated=False)


def gate_up_int4(x_TD: torch.Tensor, plan: ExpertPlan, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`gate_up` with INT4 weights as stored."""
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
        return launch_grouped(x_TD, plan, packed, scale, gated=True)
    return grouped_reference(x_TD, plan, dequantise(packed, scale, x_TD.dtype), gated=True)


def down_int4(inner_PI: torch.Tensor, plan: ExpertPlan, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`down` with INT4 weights as stored."""
    if inner_PI.is_cuda and inner_PI.dtype == torch.bfloat16:
        return launch_grouped(inner_PI, plan, packed, scale, gated=False)
    return grouped_reference(inner_PI, plan, dequantise(packed, scale, inner_PI.dtype), gated=False)


def grouped_reference(x: torch.Tensor, plan: ExpertPlan, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Block by block in PyTorch, read by the host; rows of pairs outside the plan are zero."""
    per_token = plan.rows.numel() // x.shape[0] if gated else 1
    width = weight.shape[1] // 2 if gated else weight.shape[1]
    out = x.new_zeros(plan.rows.numel(), width)
    arrays = (plan.block_expert, plan.block_first, plan.block_count)
    blocks = zip(*(a[: int(plan.num_blocks)].tolist() for a in arrays), strict=True)
    for expert, first, count in blocks:
        pairs = plan.rows[first : first + count].long()
        y = x[pairs // per_token] @ weight[expert].to(x.dtype).T
        out[pairs] = silu_mul(y) if gated else y
    return out


@jit
def _plain_tile(  # type: ignore[no-untyped-def]
    weight_ptr, row, column, real_row, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[N, BLOCK_K] of a matrix [.., COLUMNS]: rows `row` (int64 [N]), from `column` on."""
    columns = column + tl.arange(0, BLOCK_K)
    where = weight_ptr + row[:, None] * COLUMNS + columns[None, :]
    if EVEN:
        tile = tl.load(where)
    else:
        tile = tl.load(where, mask=real_row[:, None] & (columns < COLUMNS)[None, :], other=0.0)
    return tile


@jit
def _int4_tile(  # type: ignore[no-untyped-def]
    packed_ptr, scale_ptr, row, column, real_row, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The same of a packed matrix, dequantised."""
    words = column // 8 + tl.arange(0, BLOCK_K // 8)
    groups = column // GROUP + tl.arange(0, BLOCK_K // GROUP)
    real_words = real_row[:, None] & (words < COLUMNS // 8)[None, :]
    real_groups = real_row[:, None] & (groups < COLUMNS // GROUP)[None, :]
    word = tl.load(packed_ptr + row[:, None] * (COLUMNS // 8) + words[None, :], mask=real_words, other=0)
    scale = tl.load(scale_ptr + row[:, None] * (COLUMNS // GROUP) + groups[None, :], mask=real_groups, other=0.0)
    # A join's new axis varies fastest: last joined are neighbours.
    halves = tl.join(word, word >> 16)
    octets = tl.join(halves, halves >> 8)
    nibbles = tl.join(octets, octets >> 4) & 15
    q = tl.reshape(nibbles, [BLOCK_N, BLOCK_K // GROUP, GROUP]).to(tl.float32) - 8.0
    return tl.reshape(q * scale.to(tl.float32)[:, :, None], [BLOCK_N, BLOCK_K]).to(DTYPE)


@jit
def _grouped_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, scale_ptr, out_ptr, rows_ptr, expert_ptr, first_ptr, count_ptr, number_ptr, PER_TOKEN,
    OUT: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, BAND: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, INT4: tl.constexpr, GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One block of tokens and BLOCK_N outputs a program."""
    # A band of blocks goes through the tiles together: blocks of one expert are neighbours and share its weights in L2.
    index = tl.program_id(0)
    block = index // (BAND * TILES) * BAND + index % BAND
    tile = index // BAND % TILES
    if block >= tl.load(number_ptr):
        return
    expert = tl.load(expert_ptr + block).to(tl.int64)
    place = tl.arange(0, BLOCK_M)
    planned = place < tl.load(count_ptr + block)
    pair = tl.load(rows_ptr + tl.load(first_ptr + block) + place, mask=planned, other=0).to(tl.int64)
    EVEN_K: tl.constexpr = COLUMNS % BLOCK_K == 0
    EVEN: tl.constexpr = EVEN_K and OUT % BLOCK_N == 0
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_real = n < OUT
    n_row = tl.where(n_real, n, 0)
    row = expert * (2 * OUT if GATED else OUT) + n_row
    x_row = x_ptr + (pair // PER_TOKEN)[:, None] * COLUMNS
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for column in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
        k = column + tl.arange(0, BLOCK_K)
        real = planned[:, None] if EVEN_K else planned[:, None] & (k < COLUMNS)[None, :]
        x = tl.trans(tl.load(x_row + k[None, :], mask=real, other=0.0))
        if INT4:
            w = _int4_tile(weight_ptr, scale_ptr, row, column, n_real, COLUMNS, BLOCK_N, BLOCK_K, GROUP,
                           x_ptr.dtype.element_ty)  # fmt: skip
        else:
            w = _plain_tile(weight_ptr, row, column, n_real, COLUMNS, BLOCK_K, EVEN)
        gate = tl.dot(w, x, gate, input_precision="ieee")
        if GATED:
            if INT4:
                w = _int4_tile(weight_ptr, scale_ptr, row + OUT, column, n_real, COLUMNS, BLOCK_N, BLOCK_K, GROUP,
                               x_ptr.dtype.element_ty)  # fmt: skip
            else:
                w = _plain_tile(weight_ptr, row + OUT, column, n_real, COLUMNS, BLOCK_K, EVEN)
            up = tl.dot(w, x, up, input_precision="ieee")
    if GATED:
        gate = gate / (1.0 + tl.exp(-gate)) * up
    out = tl.trans(gate.to(out_ptr.dtype.element_ty))
    tl.store(out_ptr + pair[:, None] * OUT + n[None, :], out, mask=planned[:, None] & n_real[None, :])


def launch_grouped(
    x: torch.Tensor,
    plan: ExpertPlan,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    gated: bool,
    tile: Tile | None = None,
    band: int = 8,
) -> torch.Tensor:
    """The Triton kernel: [P, O] at pair index; x is [T, columns] if gated, else [P, columns]."""
    num_pairs, columns = plan.rows.numel(), x.shape[1]
    int4 = scale is not None
    assert weight.dim() == 3 and weight.shape[2] * (8 if int4 else 1) == columns, (weight.shape, x.shape)
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    if scale is not None:
        assert weight.dtype == torch.int32 and scale.is_contiguous() and columns % GROUP == 0, (weight.dtype, columns)
        assert scale.shape == (*weight.shape[:2], columns // GROUP), (scale.shape, weight.shape)
    else:
        assert weight.dtype == x.dtype, (weight.dtype, x.dtype)
    assert not gated or weight.shape[1] % 2 == 0
    width = weight.shape[1] // 2 if gated else weight.shape[1]
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    assert num_pairs % x.shape[0] == 0 and (gated or num_pairs == x.shape[0]), (num_pairs, x.shape)
    if tile is None:
        tile = tile_for(plan.block, gated, int4, limits(x.device).smem if x.is_cuda else 232448)
    tiles = triton.cdiv(width, tile.rows)
    _grouped_kernel[(triton.cdiv(plan.max_blocks, band) * band * tiles,)](
        x,
        weight,
        scale,
        out,
        plan.rows,
        plan.block_expert,
        plan.block_first,
        plan.block_count,
        plan.num_blocks,
        num_pairs // x.shape[0],
        OUT=width,
        COLUMNS=columns,
        TILES=tiles,
        BAND=band,
        BLOCK_M=max(16, triton.next_power_of_2(plan.block)),
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        GATED=gated,
        INT4=int4,
        GROUP=GROUP,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
