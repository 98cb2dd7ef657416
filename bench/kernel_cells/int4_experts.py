"""Cells of the INT4 expert products at decode: K2's gate and up, and down, whole and cut several ways, by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from bench.kernel_cells import Cell

from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import Fragments, Tile, product_cuda, tile_for

EXPERTS, TOP_K, HIDDEN, INNER = 384, 8, 7168, 2048
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
NARROW_TOKENS = (1, 8, 32, 128, 256)

GATE_UP_TILES = (
    Tile(),
    Tile(order=1),
    Tile(waves=1),
    Tile(waves=1, order=1),
    Tile(ks=8, pf=2, minb=2),
    Tile(ks=8, pf=2, minb=2, waves=1),
    Tile(ks=2, minb=8),
    Tile(ks=4, wr=1, rb=2, minb=5),
    Tile(ks=4, wr=1, rb=2, minb=5, waves=1),
    Tile(ks=2, wr=1, rb=2, minb=10, waves=1),
)
DOWN_TILES = (
    Tile(),
    Tile(order=1),
    Tile(waves=1),
    Tile(waves=1, order=1),
    Tile(waves=2),
    Tile(ks=2, wr=4),
    Tile(ks=2, wr=4, waves=1),
    Tile(ks=2, minb=8),
    Tile(ks=2, minb=8, waves=1),
    Tile(ks=4, wr=1, minb=8, waves=1),
    Tile(ks=4, wr=1, rb=2, minb=5, waves=1),
    Tile(ks=1, wr=4, minb=8, waves=1),
    Tile(ks=1, wr=2, rb=2, minb=8, waves=1),
    Tile(ks=1, wr=4, rb=2, waves=1),
    Tile(ks=1, wr=2, rb=4, pf=2, minb=6, waves=1),
)
NARROW_GATE_UP_TILES = (
    Tile(),
    Tile(waves=1),
    Tile(ks=2, minb=8, waves=1),
    Tile(ks=2, wr=1, rb=2, minb=10),
    Tile(ks=2, wr=1, rb=2, minb=10, waves=1),
    Tile(ks=4, wr=1, rb=2, minb=5, waves=1),
    Tile(ks=1, wr=2, minb=16, waves=1),
    Tile(ks=1, wr=2, rb=2, minb=8, waves=1),
    Tile(ks=1, wr=4, minb=8, waves=1),
)
NARROW_DOWN_TILES = (
    Tile(ks=1, wr=4, minb=8, waves=1),
    Tile(ks=1, wr=4, waves=1),
    Tile(ks=1, wr=4, waves=2),
    Tile(ks=1, wr=8, waves=1),
    Tile(ks=1, wr=2, rb=2, minb=8, waves=1),
    Tile(ks=1, wr=4, rb=2, waves=1),
    Tile(ks=1, wr=4, rb=2, pf=2, minb=5, waves=1),
    Tile(ks=1, wr=2, rb=4, pf=2, minb=6, waves=1),
    Tile(ks=1, wr=4, rb=4, pf=2, minb=2, waves=1),
    Tile(ks=1, wr=2, rb=2, minb=10),
    Tile(ks=1, wr=4, rb=2, waves=1, order=1),
    Tile(ks=2, wr=4, pf=2, waves=1),
)
"""A fourth or an eighth of the intermediate: few steps of an item, so that what comes before and after them shows."""


@dataclass(frozen=True)
class Routing(ExpertPlan):
    """Uniform choices, sorted and cut into blocks (built here, so that only the product is measured)."""

    distinct: int


def routing(tokens: int, held: int, seed: int) -> Routing:
    """Random top-k of all experts; the first `held` are here. Blocks have the room that a plan of this shape has."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices.flatten()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=EXPERTS)[:held].tolist()
    found, start = [], 0
    for expert, count in enumerate(counts):
        found += [(expert, start + at, min(8, count - at)) for at in range(0, count, 8)]
        start += count
    room = min(ids.numel(), held + ids.numel() // 8)
    table = torch.zeros(room, 3, dtype=torch.int32)
    if found:
        table[: len(found)] = torch.tensor(found, dtype=torch.int32)
    experts, firsts, sizes = (table[:, i].contiguous().cuda() for i in range(3))
    num_blocks = torch.tensor([len(found)], dtype=torch.int32).cuda()
    distinct = sum(1 for count in counts if count)
    return Routing(order.int().cuda(), experts, firsts, sizes, num_blocks, 8, distinct)


def random_stack(experts: int, rows: int, columns: int) -> Fragments:
    """Any words are weights; scales keep the results near one."""
    words = torch.empty(experts, rows // 16, columns // 64, 32, 4, dtype=torch.int32, device="cuda")
    words.random_(-(1 << 31), (1 << 31) - 1)
    scales = torch.empty(experts, rows // 16, columns // 64, 8, 2, 2, dtype=torch.bfloat16, device="cuda")
    return Fragments(words, scales.uniform_(0.002, 0.006))


def error(x: torch.Tensor, plan: Routing, stack: Fragments, tile: Tile, gated: bool) -> float:
    """The largest relative error over the first, the middle and the last block."""
    width = stack.rows // (2 if gated else 1)
    out = torch.full((plan.rows.shape[0], width), float("nan"), dtype=torch.bfloat16, device="cuda")
    product_cuda(x, plan, stack, tile, gated=gated, out_PO=out)
    worst, last = 0.0, int(plan.num_blocks) - 1
    for block in {0, last // 2, last} if last >= 0 else ():
        first, count = int(plan.block_first[block]), int(plan.block_count[block])
        pairs = plan.rows[first : first + count].long()
        matrix = stack.matrix(int(plan.block_expert[block]), torch.float64)
        y = x[pairs // TOP_K if gated else pairs].double() @ matrix.T
        want = F.silu(y[:, :width]) * y[:, width:] if gated else y
        found = float((out[pairs].double() - want).norm() / want.norm())
        worst = max(worst, found) if found == found else float("inf")
    return worst


def cells() -> Iterator[Cell]:
    """Every tile at every token count; of the expert-parallel half only what is shipped."""
    for layout, experts, inner in (
        ("full", EXPERTS, INNER),
        ("tp2", EXPERTS, INNER // 2),
        ("ep2", EXPERTS // 2, INNER),
        ("tp4", EXPERTS, INNER // 4),
        ("tp8", EXPERTS, INNER // 8),
    ):
        narrow = inner < INNER // 2
        for gated in (True, False):
            rows, columns = (2 * inner, HIDDEN) if gated else (HIDDEN, inner)
            stack = random_stack(experts, rows, columns)
            tiles = () if layout == "ep2" else GATE_UP_TILES if gated else DOWN_TILES
            if narrow:
                tiles = NARROW_GATE_UP_TILES if gated else NARROW_DOWN_TILES
            for tokens in NARROW_TOKENS if narrow else TOKENS:
                yield from _cells_of(layout, stack, tokens, gated, tiles)
            del stack


def _cells_of(layout: str, stack: Fragments, tokens: int, gated: bool, tiles: tuple[Tile, ...]) -> Iterator[Cell]:
    experts, rows, columns = stack.words.shape[0], stack.rows, stack.columns
    # Few tokens touch few experts: more routings, so that together they are several times the L2 cache.
    plans = [routing(tokens, experts, seed) for seed in range(16 if tokens <= 4 else 6)]
    x = torch.randn(tokens if gated else tokens * TOP_K, columns, device="cuda").bfloat16()
    shipped = tile_for(gated, columns, tokens * TOP_K)
    for variant, tile in [("", shipped), *((tile.name, tile) for tile in tiles)]:
        calls: list[Callable[[], object]] = [
            partial(product_cuda, x, plan, stack, tile, gated=gated) for plan in plans if plan.distinct
        ]
        yield Cell(
            kernel="int4_gate_up" if gated else "int4_down",
            shape={"tokens": tokens, "layout": layout},
            calls=calls,
            bytes=sum(plan.distinct for plan in plans) / len(calls) * rows * columns * (1 / 2 + 2 / 32),
            variant=variant,
            check=partial(error, x, plans[0], stack, tile, gated),
        )
