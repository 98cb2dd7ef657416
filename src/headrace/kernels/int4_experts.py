"""Products of a few tokens with their INT4 experts (decode): weights stream from memory into tensor-core registers.

Shapes: T tokens, k choices a token, P = T*k pairs, R rows of x, B blocks of pairs, X experts; a stack is [N, K] an
expert, D hidden, I intermediate; O is what a pair gets: I after gate and up, D after down.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from headrace.kernels.activation import silu_mul
from headrace.kernels.device import limits
from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.nvrtc import Kernel, defined, kernel
from headrace.weights.formats import dequantise

SOURCE = Path(__file__).with_suffix(".cu")
ROWS, COLUMNS, GROUP = 16, 64, 32
"""A lane's 16 bytes serve 16 rows x 64 columns of a warp: two groups of 32 columns."""

_SLICE_BYTES = 64 << 20
_TOKENS = 8  # columns of one product of the tensor cores


@dataclass(frozen=True)
class Fragments:
    """One product of all local experts in fragment order, as `repack` leaves it."""

    words: torch.Tensor
    """int32 [X, N/16, K/64, 32, 4]."""
    scales: torch.Tensor
    """bf16 [X, N/16, K/64, 8, 2, 2]."""
    reserve: int = 0
    """Multiprocessors that something else may hold while a product runs, a receive that waits for its peer, say: of a
    grid that counts on all of them some blocks would start when the others have ended."""

    @property
    def rows(self) -> int:
        """N."""
        return self.words.shape[1] * ROWS

    @property
    def columns(self) -> int:
        """K."""
        return self.words.shape[2] * COLUMNS

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """A local expert's [N, K], dequantised."""
        packed, scale = unpack_fragments(self.words[expert : expert + 1], self.scales[expert : expert + 1])
        return dequantise(packed[0], scale[0], dtype)


def fits(rows: int, columns: int, parts: int = 1) -> bool:
    """Whether a stack of these rows (of `parts` equal parts) and columns can lie in fragment order."""
    return rows % (ROWS * parts) == 0 and columns % COLUMNS == 0 and rows > 0 and columns > 0


def repack(packed_XNW: torch.Tensor, scale_XNG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As stored → fragment order, in the same memory: what is passed in is overwritten. See `weights.formats`.

    Word j of lane 4g + t holds columns c..c+3, c = 64 kb + 32 (j//2) + 8 t + 4 (j%2), of rows g and g + 8.
    """
    experts, rows, width = packed_XNW.shape
    columns = width * 8
    assert fits(rows, columns), (rows, columns)
    assert packed_XNW.dtype == torch.int32 and packed_XNW.is_contiguous(), packed_XNW.dtype
    assert scale_XNG.dtype == torch.bfloat16 and scale_XNG.is_contiguous(), scale_XNG.dtype
    assert scale_XNG.shape == (experts, rows, columns // GROUP), scale_XNG.shape
    step = max(1, _SLICE_BYTES // (rows * width * 4))
    for first in range(0, experts, step):
        words, scales = packed_XNW[first : first + step], scale_XNG[first : first + step]
        words.copy_(_to_fragments(words).view_as(words))
        by_row = scales.view(-1, rows // ROWS, 2, 8, columns // COLUMNS, 2)
        scales.copy_(by_row.permute(0, 1, 4, 3, 2, 5).reshape(scales.shape))
    return (
        packed_XNW.view(experts, rows // ROWS, columns // COLUMNS, 32, 4),
        scale_XNG.view(experts, rows // ROWS, columns // COLUMNS, 8, 2, 2),
    )


def _to_fragments(packed_XNW: torch.Tensor) -> torch.Tensor:
    """[X, N/16, K/64, 32, 4] of [X, N, K/8]."""
    experts, rows, width = packed_XNW.shape
    # A stored word is eight columns of one row: two halves of four, which are words j and j + 1 of lane (g, t).
    words = packed_XNW.view(experts, rows // ROWS, 2, 8, width // 8, 2, 4)  # half of the rows, g, kb, j // 2, t
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), dim=-1)
    spread = (halves & 0x0F0F) | ((halves & 0xF0F0) << 12)  # nibbles 0 1 2 3 → 0 4 2 6
    both = spread[:, :, 0] | (spread[:, :, 1] << 4)  # [X, N/16, g, kb, j // 2, t, j % 2]
    return both.permute(0, 1, 3, 2, 5, 4, 6).reshape(experts, rows // ROWS, width // 8, 32, 4)


def unpack_fragments(words: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fragment order → as stored, in new memory: the inverse of `repack`."""
    experts, blocks, steps = words.shape[:3]
    both = words.view(experts, blocks, steps, 8, 4, 2, 2)  # g, t, j // 2, j % 2
    rows = []
    for spread in (both & 0x0F0F0F0F, (both >> 4) & 0x0F0F0F0F):  # rows g, rows g + 8
        halves = (spread & 0x0F0F) | ((spread >> 12) & 0xF0F0)
        rows.append(halves[..., 0] | (halves[..., 1] << 16))  # [X, N/16, kb, g, t, j // 2]
    packed = torch.stack(rows, dim=2).permute(0, 1, 2, 4, 3, 6, 5)
    scale = scales.permute(0, 1, 4, 3, 2, 5)
    return packed.reshape(experts, blocks * ROWS, steps * 8), scale.reshape(experts, blocks * ROWS, steps * 2)


@dataclass(frozen=True)
class Tile:
    """How a launch is cut; the fields in capitals of the source file say what each means."""

    ks: int = 4
    wr: int = 2
    rb: int = 1
    pf: int = 4
    minb: int = 4
    nb: int = 1
    order: int = 0
    waves: int = 0
    """CTAs launched: this many times what the device holds at once, each taking several items; 0: one an item."""

    @property
    def name(self) -> str:
        """Fields that differ from the default."""
        default = Tile()
        differs = [f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return ",".join(f"{name}{getattr(self, name)}" for name in differs) or "default"

    def macros(self, gated: bool, steps: int) -> tuple[tuple[str, int], ...]:
        """What the source file is compiled with."""
        values = {f.name.upper(): getattr(self, f.name) for f in fields(self) if f.name != "waves"}
        return defined(GATED=int(gated), EVEN=int(steps % (self.ks * self.pf) == 0), **values)

    def items(self, gated: bool, rows: int, blocks: int) -> int:
        """Upper bound of the items of a launch."""
        row_blocks = rows // ROWS // (2 if gated else 1)
        return blocks * -(-row_blocks // (self.wr * self.rb // (2 if gated else 1)))


# (gated, pairs at most, steps of 64 columns at least) → tile: the first that holds. Measured on one H200 at 1 to 256
# tokens of 8 choices: K2's shapes whole and halved, and a fourth and an eighth, where an item of down is over after 8
# or 4 steps: the next one's weights must be under way by then, and many row blocks read their tokens together. Those
# for many pairs under load that lasts, at the power limit: two row blocks a warp read their tokens once. Gate and up
# start while the shared experts still run beside them: of a persistent grid (waves) some blocks would start late and
# end late. Whole down of many pairs starts beside gate and up.
_TILES: tuple[tuple[bool, int, int, Tile], ...] = (
    (True, 16, 16, Tile()),
    (True, 768, 16, Tile(ks=2, minb=8)),
    (True, 1 << 30, 64, Tile(ks=2, wr=1, rb=2, minb=10)),
    (True, 1 << 30, 16, Tile(ks=2, minb=8)),
    (True, 1 << 30, 0, Tile(ks=1, wr=4, pf=2)),
    (False, 32, 32, Tile(ks=2, minb=8, waves=1)),
    (False, 256, 32, Tile(ks=1, wr=4, minb=8, waves=1)),
    (False, 1 << 30, 32, Tile(ks=1, wr=2, rb=2, minb=10)),
    (False, 1 << 30, 16, Tile(ks=1, wr=4, minb=8, waves=1)),
    (False, 1 << 30, 8, Tile(ks=1, wr=2, rb=2, minb=8, waves=1)),
    (False, 1 << 30, 0, Tile(ks=1, wr=2, rb=4, pf=2, minb=6, waves=1)),
)


def tile_for(gated: bool, columns: int, pairs: int, block: int = _TOKENS) -> Tile:
    """The tile of a shape, from the committed table."""
    steps = columns // COLUMNS
    if block > _TOKENS:
        return Tile(nb=-(-block // _TOKENS), minb=2, order=1)
    return next(tile for kind, most, least, tile in _TILES if kind == gated and pairs <= most and steps >= least)


def gate_up(x_TD: torch.Tensor, plan: ExpertPlan, stack: Fragments) -> torch.Tensor:
    """silu(gate) * up of every pair's expert and token: [P, I] at pair index.

    The stack's rows are gate, then up. Rows of pairs that are not in the plan are undefined.
    """
    return _product(x_TD, plan, stack, gated=True)


def down(inner_PI: torch.Tensor, plan: ExpertPlan, stack: Fragments, *, follows_gate_up: bool = False) -> torch.Tensor:
    """Every pair's product with its expert: [P, D] at pair index; rows of pairs not in the plan are undefined.

    follows_gate_up: the launch right before this one is `gate_up` with the same plan, so that weights may be on their
    way before it has ended.
    """
    assert inner_PI.shape[0] == plan.rows.shape[0], (inner_PI.shape, plan.rows.shape)
    return _product(inner_PI, plan, stack, gated=False, follows_gate_up=follows_gate_up)


def _product(
    x_RK: torch.Tensor, plan: ExpertPlan, stack: Fragments, *, gated: bool, follows_gate_up: bool = False
) -> torch.Tensor:
    if not x_RK.is_cuda or x_RK.dtype != torch.bfloat16:
        return product_reference(x_RK, plan, stack, gated=gated)
    pairs = plan.rows.shape[0]
    tile = tile_for(gated, stack.columns, pairs, plan.block)
    return product_cuda(x_RK, plan, stack, tile, gated=gated, follows_gate_up=follows_gate_up)


def product_reference(x_RK: torch.Tensor, plan: ExpertPlan, stack: Fragments, *, gated: bool) -> torch.Tensor:
    """Block by block in torch; zeros for pairs that are not in the plan."""
    pairs, share = plan.rows.shape[0], _share(x_RK, plan)
    out_PO = x_RK.new_zeros(pairs, stack.rows // 2 if gated else stack.rows)
    num_blocks = int(plan.num_blocks)
    columns = (plan.block_expert, plan.block_first, plan.block_count)
    for expert, first, count in zip(*(column[:num_blocks].tolist() for column in columns), strict=True):
        mine = plan.rows[first : first + count].long()
        result = F.linear(x_RK[mine // share], stack.matrix(expert, x_RK.dtype))
        out_PO[mine] = silu_mul(result) if gated else result
    return out_PO


def product_cuda(
    x_RK: torch.Tensor,
    plan: ExpertPlan,
    stack: Fragments,
    tile: Tile,
    *,
    gated: bool,
    out_PO: torch.Tensor | None = None,
    follows_gate_up: bool = False,
) -> torch.Tensor:
    """One launch with a given tile; bf16 on CUDA."""
    pairs, columns = plan.rows.shape[0], stack.columns
    assert x_RK.dtype == torch.bfloat16 and x_RK.is_contiguous() and x_RK.shape[1] == columns, (x_RK.shape, columns)
    assert stack.words.is_contiguous() and stack.scales.is_contiguous()
    assert fits(stack.rows, columns, 2 if gated else 1), (stack.rows, columns)
    assert plan.block <= _TOKENS * tile.nb, (plan.block, tile)
    assert x_RK.data_ptr() % 16 == 0 and stack.words.data_ptr() % 16 == 0 and stack.scales.data_ptr() % 8 == 0
    assert stack.words.device == stack.scales.device == x_RK.device
    for tensor in (plan.rows, plan.block_expert, plan.block_first, plan.block_count, plan.num_blocks):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device == x_RK.device
    width = stack.rows // 2 if gated else stack.rows
    if out_PO is None:
        out_PO = torch.empty(pairs, width, dtype=x_RK.dtype, device=x_RK.device)
    assert out_PO.shape == (pairs, width) and out_PO.dtype == x_RK.dtype and out_PO.is_contiguous()
    grid = tile.items(gated, stack.rows, plan.block_expert.shape[0])
    if tile.waves:
        grid = min(grid, (limits(x_RK.device).multiprocessors - stack.reserve) * tile.minb * tile.waves)
    steps = columns // COLUMNS
    args = (x_RK, stack.words, stack.scales, out_PO, plan.rows, plan.block_expert, plan.block_first, plan.block_count)
    launch = _compiled(tile, gated, steps, x_RK.device.index)
    launch(
        (grid, 1, 1),
        32 * tile.ks * tile.wr,
        (*args, plan.num_blocks, width // ROWS, steps, _share(x_RK, plan)),
        early=gated or follows_gate_up,
    )
    return out_PO


def _share(x_RK: torch.Tensor, plan: ExpertPlan) -> int:
    """Pairs that read one row of x."""
    pairs, rows = plan.rows.shape[0], x_RK.shape[0]
    assert pairs % max(1, rows) == 0, (pairs, rows)
    return max(1, pairs // max(1, rows))


@cache
def _compiled(tile: Tile, gated: bool, steps: int, device_index: int) -> Kernel:
    return kernel(SOURCE, "int4_experts", tile.macros(gated, steps), device_index)
