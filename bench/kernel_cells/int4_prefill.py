"""Cells of the INT4 expert products for many tokens an expert, at K2's shapes: 384 experts, top 8, hidden 7168.

Floors: useful products only (tails of blocks count against the kernel), or the weights of the experts in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from bench.kernel_cells import Cell

from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import Fragments
from headrace.kernels.int4_prefill import Tile, limits, product_cuda, tile_for

EXPERTS, TOP_K, HIDDEN, WIDTH = 384, 8, 7168, 2048
TOKENS = (8192, 4096, 2048, 1024, 512, 256)
ROUTINGS = 3


@dataclass(frozen=True)
class Planned(ExpertPlan):
    """Pairs in blocks."""

    distinct: int
    pairs: int
    """Of held experts."""


def plan(ids_Tk: torch.Tensor, held: int, block: int) -> Planned:
    """Pairs of experts 0..held-1 sorted and cut into blocks, in torch."""
    flat = ids_Tk.flatten().cpu()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=held)[:held].tolist()
    found, first = [], 0
    for expert, count in enumerate(counts):
        found += [(expert, first + i, min(block, count - i)) for i in range(0, count, block)]
        first += count
    used = len(found)
    # As a planner that knows shapes only must: one block more an expert.
    found += [(0, 0, 0)] * (held + flat.numel() // block - used)
    columns = (torch.tensor(found, dtype=torch.int32, device="cuda").T).contiguous()
    num_blocks = torch.tensor([used], dtype=torch.int32, device="cuda")
    distinct = sum(count > 0 for count in counts)
    return Planned(order.int().cuda(), columns[0], columns[1], columns[2], num_blocks, block, distinct, first)


def random_stack(held: int, rows: int, columns: int) -> Fragments:
    """Random weights, made in place on the device."""
    words = torch.empty(held, rows // 16, columns // 64, 32, 4, dtype=torch.int32, device="cuda")
    words.random_(-(1 << 31), (1 << 31) - 1)
    scales = torch.empty(held, rows // 16, columns // 64, 8, 2, 2, dtype=torch.bfloat16, device="cuda")
    return Fragments(words, scales.uniform_(0.001, 0.02))


def tiles(tokens: int) -> Iterator[tuple[str, Tile]]:
    """The shipped tile (no name) and others worth a try at so many tokens."""
    capability, smem, _ = limits(torch.device("cuda", torch.cuda.current_device()))
    shipped = tile_for(capability, smem, 128)
    assert shipped is not None
    candidates = [shipped]
    if capability == (9, 0):
        # (block, nstep, stages, lag): the sizes of n that a block of more than 128 may have are those that compile
        # without the products being serialised.
        sizes = [(128, 16, 8, 6), (128, 16, 8, 2), (128, 32, 8, 4), (96, 16, 9, 4), (64, 16, 12, 6), (32, 16, 12, 8)]
        if tokens >= 2048:
            sizes.append((192, 96, 6, 3))
        candidates += [Tile(True, block, stages, lag, nstep) for block, nstep, stages, lag in sizes]
    candidates += [Tile(False, 128, 3), Tile(False, 128, 4), Tile(False, 64, 4), Tile(False, 32, 4)]
    for tile in candidates:
        if max(tile.smem(True), tile.smem(False)) <= smem:
            yield ("" if tile is shipped else tile.name), tile


def check(x: torch.Tensor, planned: Planned, stack: Fragments, tile: Tile, gated: bool) -> float:
    """Worst norm-wise error of some pairs: of the first, middle and last block, first and last in each."""
    out = product_cuda(x, planned, stack, tile, gated=gated)
    worst, share = 0.0, planned.rows.numel() // x.shape[0]
    used = int(planned.num_blocks)
    for block in (0, used // 3, used // 2, used - 1):
        expert, first, count = (
            int(column[block]) for column in (planned.block_expert, planned.block_first, planned.block_count)
        )
        matrix = stack.matrix(expert, torch.float64)
        for i in (first, first + count - 1):
            pair = int(planned.rows[i])
            want = matrix @ x[pair // share].double()
            if gated:
                gate, up = want.chunk(2)
                want = F.silu(gate) * up
            worst = max(worst, float((out[pair].double() - want).norm() / want.norm()))
    return worst


def cells() -> Iterator[Cell]:
    """Both products, whole and as halves of a tensor- or expert-parallel pair."""
    for split, held, width in (("full", EXPERTS, WIDTH), ("tp2", EXPERTS, WIDTH // 2), ("ep2", EXPERTS // 2, WIDTH)):
        for gated in (True, False):
            rows, columns = (2 * width, HIDDEN) if gated else (HIDDEN, width)
            stack = random_stack(held, rows, columns)
            for tokens in TOKENS if split == "full" else TOKENS[:1]:
                yield from cells_of(split, stack, held, tokens, gated)
            del stack
            torch.cuda.empty_cache()


def cells_of(split: str, stack: Fragments, held: int, tokens: int, gated: bool) -> Iterator[Cell]:
    """All variants at one shape."""
    rows, columns = stack.rows, stack.columns
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    xs, routings = [], []
    for _ in range(ROUTINGS):
        scores = torch.rand(tokens, EXPERTS, device="cuda", generator=generator)
        routings.append(scores.topk(TOP_K).indices)
        count = tokens if gated else tokens * TOP_K
        xs.append(torch.randn(count, columns, device="cuda", generator=generator, dtype=torch.bfloat16))
    for name, tile in tiles(tokens):
        plans = [plan(ids, held, tile.block) for ids in routings]
        calls: list[Callable[[], object]] = [
            partial(product_cuda, x, planned, stack, tile, gated=gated) for x, planned in zip(xs, plans, strict=True)
        ]
        pairs = sum(p.pairs for p in plans) / ROUTINGS
        weights = sum(p.distinct for p in plans) / ROUTINGS * (rows * columns / 2 + rows * columns / 16)
        moved = min(pairs, xs[0].shape[0]) * columns * 2 + pairs * (rows // 2 if gated else rows) * 2
        yield Cell(
            kernel="int4_prefill_gate_up" if gated else "int4_prefill_down",
            shape={"tokens": tokens, "split": split},
            calls=calls,
            bytes=weights + moved,
            flops=2.0 * pairs * rows * columns,
            variant=name,
            check=partial(check, xs[0], plans[0], stack, tile, gated),
        )
