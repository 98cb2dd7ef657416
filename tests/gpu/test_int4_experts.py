"""INT4 experts for decode on a GPU, against float64 on the same device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import Fragments, Tile, down, gate_up, product_cuda, repack, tile_for
from headrace.weights.formats import dequantise
from tests.kernels.test_int4_experts import EMULATED_TILES, blocks_of, stored

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

# (rows before the halving of gate and up, columns): tiny ones, odd ones, K2 whole and halved.
SHAPES = [(32, 64), (96, 192), (160, 1088), (4096, 7168), (2048, 7168)]
DOWN_SHAPES = [(16, 64), (48, 192), (7168, 2048), (7168, 1024)]


def to_cuda(plan: ExpertPlan) -> ExpertPlan:
    names = ("rows", "block_expert", "block_first", "block_count", "num_blocks")
    return replace(plan, **{name: getattr(plan, name).cuda() for name in names})


def case(
    experts: int, rows: int, columns: int, tokens: int, k: int, held: range, block: int, gated: bool
) -> tuple[torch.Tensor, ExpertPlan, Fragments, torch.Tensor, torch.Tensor]:
    """x, plan, weights, float64 result and which pairs have one."""
    generator = torch.Generator().manual_seed(rows + columns + tokens)
    packed, scale = (t.cuda() for t in stored(len(held), rows, columns, seed=tokens))
    ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)])
    x = torch.randn(tokens if gated else tokens * k, columns, generator=generator).bfloat16().cuda()
    width = rows // (2 if gated else 1)
    want = torch.zeros(tokens * k, width, dtype=torch.float64, device="cuda")
    flat = ids.flatten().cuda()
    for expert in held:
        pairs = (flat == expert).nonzero().flatten()
        if pairs.numel():
            matrix = dequantise(packed[expert - held.start], scale[expert - held.start], torch.float64)
            y = x[pairs // k if gated else pairs].double() @ matrix.T
            want[pairs] = F.silu(y[:, :width]) * y[:, width:] if gated else y
    chosen = (flat >= held.start) & (flat < held.stop)
    return x, to_cuda(blocks_of(ids, held, block)), Fragments(*repack(packed, scale)), want, chosen


def agree(got: torch.Tensor, want: torch.Tensor, chosen: torch.Tensor) -> None:
    error = (got.double() - want)[chosen].norm() / want[chosen].norm()
    assert error < 5e-3, float(error)


@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
@pytest.mark.parametrize("held", [range(12), range(3, 9)])
@pytest.mark.parametrize(
    ("gated", "shape"), [(True, shape) for shape in SHAPES] + [(False, shape) for shape in DOWN_SHAPES]
)
def test_product(gated: bool, shape: tuple[int, int], held: range, tokens: int) -> None:
    x, plan, stack, want, chosen = case(12, *shape, tokens, 4, held, 8, gated)
    out = torch.full_like(want, float("nan"), dtype=torch.bfloat16)
    tile = tile_for(gated, shape[1], plan.rows.shape[0])
    product_cuda(x, plan, stack, tile, gated=gated, out_PO=out)
    assert torch.equal(out.isnan().all(dim=1), ~chosen)
    if chosen.any():
        agree(out, want, chosen)


@pytest.mark.parametrize("block", [8, 16])
@pytest.mark.parametrize("gated", [True, False])
def test_crowded_expert(gated: bool, block: int) -> None:
    x, plan, stack, want, chosen = case(4, 64, 512, 100, 3, range(4), block, gated)
    product = gate_up if gated else down
    agree(product(x, plan, stack), want, chosen)


@pytest.mark.parametrize(("gated", "tile", "columns", "width", "grid"), EMULATED_TILES)
def test_every_form(gated: bool, tile: Tile, columns: int, width: int, grid: int | None) -> None:
    rows = width * (2 if gated else 1)
    for waves in (0, 1):
        x, plan, stack, want, chosen = case(5, rows, columns, 13, 2, range(1, 4), 8 * tile.nb, gated)
        out = torch.full_like(want, float("nan"), dtype=torch.bfloat16)
        product_cuda(x, plan, stack, replace(tile, waves=waves), gated=gated, out_PO=out)
        assert torch.equal(out.isnan().all(dim=1), ~chosen)
        agree(out, want, chosen)


def test_persistent_ctas_take_many_items() -> None:
    x, plan, stack, want, chosen = case(64, 4096, 1024, 64, 8, range(64), 8, False)
    for tile in (Tile(waves=1), Tile(waves=1, order=1), Tile(waves=1, minb=3)):
        out = torch.full_like(want, float("nan"), dtype=torch.bfloat16)
        product_cuda(x, plan, stack, tile, gated=False, out_PO=out)
        agree(out, want, chosen)


def test_graph_replays_with_other_tokens_and_routing() -> None:
    tokens, k = 6, 4
    x, plan, stack, want, chosen = case(12, 256, 512, tokens, k, range(2, 10), 8, True)
    gate_up(x, plan, stack)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gate_up(x, plan, stack)
    graph.replay()
    agree(out, want, chosen)
    packed, scale = stored(8, 256, 512, seed=tokens)
    ids = torch.tensor([[2, 3, 4, 5]] * tokens)
    fresh = to_cuda(blocks_of(ids, range(2, 10), 8, spare=0))
    for name in ("rows", "block_expert", "block_first", "block_count", "num_blocks"):
        here, there = getattr(plan, name), getattr(fresh, name)
        here[: len(there)] = there
    x.copy_(torch.randn_like(x))
    graph.replay()
    y = torch.cat([x.double() @ dequantise(packed[e], scale[e], torch.float64).cuda().T for e in range(4)])
    y = y.view(k, tokens, -1).transpose(0, 1).reshape(tokens * k, -1)
    agree(out, F.silu(y[:, :128]) * y[:, 128:], torch.ones_like(chosen))


def test_float32_takes_the_reference() -> None:
    x, plan, stack, want, chosen = case(4, 64, 128, 3, 2, range(4), 8, True)
    torch.testing.assert_close(gate_up(x.float(), plan, stack).double()[chosen], want[chosen], rtol=1e-4, atol=1e-4)
