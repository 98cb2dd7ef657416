"""Cells of everything around the expert products, the bf16 products themselves, and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from bench.kernel_cells import Cell

from headrace.kernels.argmax import launch_argmax
from headrace.kernels.combine import combine_reference, launch_combine
from headrace.kernels.dispatch import ExpertPlan, plan_experts, route_and_plan
from headrace.kernels.grouped import Tile, launch_grouped, tile_for
from headrace.kernels.routing import UniformRouting, launch_route
from headrace.kernels.sampling import launch_sample, sample_reference

K2 = (384, 8)
FEW = (1, 4, 16, 64, 128)
VOCAB = 163840

FEW_TILES = (
    Tile(64, 64, 3, 4),
    Tile(64, 64, 6, 4),
    Tile(64, 128, 3, 4),
    Tile(32, 128, 4, 4),
    Tile(32, 256, 3, 4),
    Tile(128, 64, 3, 4),
    Tile(64, 256, 2, 4),
)
MANY_TILES = (
    Tile(64, 64, 3, 4),
    Tile(64, 64, 4, 4),
    Tile(64, 128, 2, 4),
    Tile(128, 64, 2, 8),
    Tile(128, 64, 3, 8),
    Tile(128, 64, 4, 8),
    Tile(128, 128, 2, 8),
)


def cells() -> Iterator[Cell]:
    """Small kernels first, then products, then sampling."""
    yield from _routing_cells()
    yield from _combine_cells()
    yield from _product_cells()
    yield from _int4_cells()
    yield from _sampling_cells()


def _choices(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k, dim=-1).indices.int()


def _distinct(ids: torch.Tensor) -> int:
    return int((torch.bincount(ids.flatten()) > 0).sum())


def _routing_cells() -> Iterator[Cell]:
    experts, top_k = K2
    bias = torch.randn(experts, device="cuda")
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    for tokens in (*FEW, 8192):
        logits = torch.randn(tokens, experts, device="cuda")
        size = tokens * experts * 4.0
        for warps in (1, 2, 4):
            call = partial(launch_route, logits, bias, top_k, softmax=False, normalise=True, scale=2.5, num_warps=warps)
            yield Cell("route", {"tokens": tokens}, [call], bytes=size, variant="" if warps == 1 else f"{warps} warps")
        uniform = UniformRouting(counter, 3)
        call = partial(launch_route, logits, bias, top_k, softmax=False, normalise=True, scale=2.5, uniform=uniform)
        yield Cell("route", {"tokens": tokens}, [call], bytes=size, variant="uniform")
        block = 8 if tokens <= 128 else 128
        ids = _choices(tokens, experts, top_k)
        shape: dict[str, int | str] = {"tokens": tokens, "block": block}
        yield Cell("plan", shape, [partial(plan_experts, ids, range(experts), block)], bytes=ids.numel() * 4.0)
        fused = partial(
            route_and_plan, logits, bias, top_k, range(experts), block, softmax=False, normalise=True, scale=2.5
        )
        yield Cell("route_and_plan", shape, [fused], bytes=size)


def _combine_cells() -> Iterator[Cell]:
    for hidden, tokens in ((h, t) for h in (7168, 2048) for t in (*FEW, 8192)):
        ids, weights = _choices(tokens, *K2), torch.rand(tokens, 8, device="cuda")
        y = torch.randn(tokens * 8, hidden, device="cuda").bfloat16()
        shared = torch.randn(tokens, hidden, device="cuda").bfloat16()
        for block, warps in ((1024, 4), (512, 2), (256, 1), (512, 4), (2048, 4)):
            call = partial(launch_combine, y, weights, ids, range(384), shared, block=block, num_warps=warps)
            yield Cell(
                "combine",
                {"tokens": tokens, "hidden": hidden},
                [call],
                bytes=tokens * 10.0 * hidden * 2,
                variant="" if block == 1024 else f"{block} columns {warps} warps",
                check=partial(_combine_error, call, y, weights, ids, shared),
            )


def _combine_error(
    call: Callable[[], torch.Tensor], y: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor
) -> float:
    expected = combine_reference(y, weights, ids, range(384), shared).double()
    return float((call().double() - expected).norm() / expected.norm())


def _product_cells() -> Iterator[Cell]:
    """Qwen3-30B-A3B's experts in bf16."""
    experts, top_k, hidden, width = 128, 8, 2048, 768
    for gated in (True, False):
        rows, columns = (2 * width, hidden) if gated else (hidden, width)
        weights = [
            torch.randn(experts, rows, columns, device="cuda", dtype=torch.bfloat16) * columns**-0.5 for _ in range(2)
        ]
        for tokens, block in [(t, 8) for t in FEW] + [(512, 64), (2048, 128), (8192, 128), (8192, 64)]:
            tiles = FEW_TILES if block == 8 else MANY_TILES
            yield from _product(weights, tokens, block, gated, (experts, top_k), tiles)


def _product(
    weights: list[torch.Tensor],
    tokens: int,
    block: int,
    gated: bool,
    routing: tuple[int, int],
    tiles: tuple[Tile, ...],
) -> Iterator[Cell]:
    experts, top_k = routing
    rows, columns = weights[0].shape[1:]
    count = 8 if tokens <= 4 else 2
    all_ids = [_choices(tokens, experts, top_k) for _ in range(count)]
    plans = [plan_experts(ids, range(experts), block) for ids in all_ids]
    touched = sum(_distinct(ids) for ids in all_ids) / count
    x = torch.randn(tokens if gated else tokens * top_k, columns, device="cuda").bfloat16()
    shipped = tile_for(block, gated, False, 232448)
    forms = [("", shipped, 8), *((f"{t.rows}x{t.columns} {t.stages} stages {t.warps} warps", t, 8) for t in tiles)]
    forms += [("band 1", shipped, 1), ("band 32", shipped, 32)] if block > 8 else []
    for variant, tile, band in forms:
        if tile.smem(max(16, block), 2 if gated else 1) > 220_000:
            continue
        yield Cell(
            "grouped_gate_up" if gated else "grouped_down",
            {"tokens": tokens, "block": block},
            [
                partial(launch_grouped, x, plan, weights[i % 2], None, gated=gated, tile=tile, band=band)
                for i, plan in enumerate(plans)
            ],
            bytes=touched * rows * columns * 2.0,
            flops=2.0 * tokens * top_k * rows * columns,
            variant=variant,
            check=partial(_product_error, x, plans[0], weights[0], None, gated, tile),
        )


def _product_error(
    x: torch.Tensor, plan: ExpertPlan, weight: torch.Tensor, scale: torch.Tensor | None, gated: bool, tile: Tile | None
) -> float:
    """The largest relative error over the first, the middle and the last block."""
    got = launch_grouped(x, plan, weight, scale, gated=gated, tile=tile)
    per_token = plan.rows.numel() // x.shape[0] if gated else 1
    last, worst = int(plan.num_blocks) - 1, 0.0
    for block in {0, last // 2, last}:
        first, count = int(plan.block_first[block]), int(plan.block_count[block])
        pairs = plan.rows[first : first + count].long()
        y = x[pairs // per_token].double() @ weight[int(plan.block_expert[block])].double().T
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        worst = max(worst, float((got[pairs].double() - y).norm() / y.norm()))
    return worst


def _int4_cells() -> Iterator[Cell]:
    """The portable INT4 products at K2's shapes."""
    experts, top_k = K2
    for gated, rows, columns in ((True, 4096, 7168), (False, 7168, 2048)):
        packed = torch.empty(experts, rows, columns // 8, dtype=torch.int32, device="cuda")
        packed.random_(-(1 << 31), (1 << 31) - 1)
        scale = torch.rand(experts, rows, columns // 32, device="cuda").bfloat16() * 0.01
        for tokens, block in ((1, 8), (16, 8), (128, 16), (8192, 128)):
            ids = [_choices(tokens, experts, top_k) for _ in range(8 if tokens <= 16 else 2)]
            plans = [plan_experts(i, range(experts), block) for i in ids]
            touched = sum(_distinct(i) for i in ids) / len(ids)
            x = torch.randn(tokens if gated else tokens * top_k, columns, device="cuda").bfloat16()
            yield Cell(
                "portable_int4_gate_up" if gated else "portable_int4_down",
                {"tokens": tokens, "block": block},
                [partial(launch_grouped, x, plan, packed, scale, gated=gated) for plan in plans],
                bytes=touched * rows * columns * (0.5 + 2 / 32),
                flops=2.0 * tokens * top_k * rows * columns,
            )


def _sampling_cells() -> Iterator[Cell]:
    for rows in (1, 16, 128, 256):
        logits = [torch.randn(rows, VOCAB, device="cuda").bfloat16() * 3 for _ in range(4)]
        for chunk in (2048, 1024, 4096):
            yield Cell(
                "argmax",
                {"rows": rows},
                [partial(launch_argmax, x, chunk) for x in logits],
                bytes=rows * VOCAB * 2.0,
                variant="" if chunk == 2048 else f"chunks of {chunk}",
            )
    for rows, knobs in ((r, k) for r in (1, 16, 128) for k in ("p 0.95", "k 50", "k 50 p 0.95", "none", "flat p 0.95")):
        logits = [torch.randn(rows, VOCAB, device="cuda") * (0.1 if "flat" in knobs else 3) for _ in range(2)]
        ones = torch.ones(rows, device="cuda")
        top_k = torch.full((rows,), 50 if "k 50" in knobs else 0, dtype=torch.int32, device="cuda")
        top_p = ones * (0.95 if "p 0.95" in knobs else 1.0)
        noise = torch.rand(rows, dtype=torch.float64, device="cuda")
        for tile, warps in ((8192, 16), (4096, 8), (8192, 32)):
            form = partial(launch_sample, tile=tile, num_warps=warps)
            yield Cell(
                "sample",
                {"rows": rows, "knobs": knobs},
                [partial(form, x, ones, top_k, top_p, ones * 0, noise) for x in logits],
                bytes=rows * VOCAB * 4.0,
                variant="" if (tile, warps) == (8192, 16) else f"tile {tile} {warps} warps",
                check=partial(_share_of_other_tokens, logits[0], ones, top_k, top_p, noise),
                tags={"tolerance": "0.1"},
            )


def _share_of_other_tokens(
    logits: torch.Tensor, ones: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, noise: torch.Tensor
) -> float:
    """How many rows draw another token than the reference, whose sums are rounded otherwise."""
    got = launch_sample(logits, ones, top_k, top_p, ones * 0, noise)[0]
    return float((got != sample_reference(logits, ones, top_k, top_p, ones * 0, noise)[0]).float().mean())
