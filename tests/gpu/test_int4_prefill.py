"""INT4 expert products for prefill on a GPU, against float64 on the same device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import Fragments
from headrace.kernels.int4_prefill import Tile, down, gate_up, limits, product_cuda, tile_for
from tests.kernels.test_int4_experts import blocks_of

pytestmark = pytest.mark.gpu

TILES = [
    Tile(True),
    Tile(True, 64, 6, 4),
    Tile(True, 192, 6, 3, 96),
    Tile(False, 128, 3),
    Tile(False, 32, 3),
]


def usable(tile: Tile) -> bool:
    capability, smem, _ = limits(torch.device("cuda", 0))
    return max(tile.smem(True), tile.smem(False)) <= smem and (not tile.hopper or capability == (9, 0))


def random_stack(experts: int, rows: int, columns: int) -> Fragments:
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (experts, rows // 16, columns // 64, 32, 4), device="cuda")
    scales = torch.rand(experts, rows // 16, columns // 64, 8, 2, 2, device="cuda") * 0.02 + 0.001
    return Fragments(words.to(torch.int32), scales.bfloat16())


def on_device(plan: ExpertPlan) -> ExpertPlan:
    rows, expert, first, count, num_blocks = (array.cuda() for array in arrays_of(plan))
    return ExpertPlan(rows, expert, first, count, num_blocks, plan.block)


def arrays_of(plan: ExpertPlan) -> tuple[torch.Tensor, ...]:
    return plan.rows, plan.block_expert, plan.block_first, plan.block_count, plan.num_blocks


def random_ids(tokens: int, experts: int, k: int, skew: float = 0.0) -> torch.Tensor:
    scores = torch.rand(tokens, experts) + torch.linspace(0, skew, experts)
    return scores.topk(k).indices


def expected(x: torch.Tensor, plan: ExpertPlan, stack: Fragments, *, gated: bool) -> torch.Tensor:
    """float64 at pair index; NaN for pairs that no held expert computes."""
    width = stack.rows // (2 if gated else 1)
    share = plan.rows.numel() // x.shape[0]
    out = torch.full((plan.rows.numel(), width), float("nan"), dtype=torch.float64, device="cuda")
    used = int(plan.num_blocks)
    columns = (plan.block_expert, plan.block_first, plan.block_count)
    for expert, first, count in zip(*(column[:used].tolist() for column in columns), strict=True):
        pairs = plan.rows[first : first + count].long()
        y = x[pairs // share].double() @ stack.matrix(expert, torch.float64).T
        out[pairs] = F.silu(y[:, :width]) * y[:, width:] if gated else y
    return out


def poisoned(like: torch.Tensor) -> None:
    """Leaves NaN in the memory that the next output of this size will take."""
    junk = torch.full(like.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    del junk


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    chosen = ~want.isnan()
    assert bool(got[chosen].isfinite().all())
    assert float((got.double()[chosen] - want[chosen]).norm() / want[chosen].norm()) < 1e-2
    rows = chosen.any(dim=1)
    by_row = (got[rows].double() - want[rows]).norm(dim=1) / want[rows].norm(dim=1)
    assert float(by_row.max()) < 2e-2


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "held"),
    [
        (2 * 512, 1024, 700, range(8)),
        (2 * 144, 64 * 9, 333, range(2, 7)),
        (32, 64, 5, range(8)),
        (7168, 2048, 300, range(3, 6)),
        (4096, 7168, 300, range(3, 6)),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_products(tile: Tile, rows: int, columns: int, tokens: int, held: range, gated: bool) -> None:
    if not usable(tile):
        pytest.skip("another device's")
    stack = random_stack(len(held), rows, columns)
    plan = on_device(blocks_of(random_ids(tokens, 8, 3, skew=0.7), held, tile.block))
    x = torch.randn(tokens if gated else tokens * 3, columns, device="cuda", dtype=torch.bfloat16)
    want = expected(x, plan, stack, gated=gated)
    for _ in range(2):
        poisoned(want)
        assert_close(product_cuda(x, plan, stack, tile, gated=gated), want)


@pytest.mark.parametrize("block", [16, 40, 128])
def test_chain_in_a_graph(block: int) -> None:
    """Both products, captured once; replays follow changed tokens and a changed plan."""
    held, tokens, k = range(6), 200, 2
    first, second = random_stack(6, 2 * 256, 512), random_stack(6, 512, 256)
    plans = [on_device(blocks_of(random_ids(tokens, 6, k, skew), held, block)) for skew in (0.0, 2.0)]
    most = max(plan.block_expert.numel() for plan in plans)

    def padded(plan: ExpertPlan) -> ExpertPlan:
        expert, first, count = (F.pad(column, (0, most - column.numel())) for column in arrays_of(plan)[1:4])
        return ExpertPlan(plan.rows, expert, first, count, plan.num_blocks, block)

    plans = [padded(plan) for plan in plans]
    xs = [torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16) for _ in plans]
    rows, expert, first_pair, count, num_blocks = (array.clone() for array in arrays_of(plans[0]))
    live = ExpertPlan(rows, expert, first_pair, count, num_blocks, block)
    x = xs[0].clone()
    down(gate_up(x, live, first), live, second)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = gate_up(x, live, first)
        y = down(inner, live, second)
    for plan, tokens_now in zip(plans, xs, strict=True):
        for to, array in zip(arrays_of(live), arrays_of(plan), strict=True):
            to.copy_(array)
        x.copy_(tokens_now)
        inner.fill_(float("nan"))
        y.fill_(float("nan"))
        graph.replay()
        assert_close(inner, expected(x, plan, first, gated=True))
        assert_close(y, expected(inner, plan, second, gated=False))


def test_no_work() -> None:
    stack = random_stack(2, 64, 128)
    plan = on_device(blocks_of(torch.tensor([[5, 6]] * 3), range(2), 128))
    got = gate_up(torch.randn(3, 128, device="cuda", dtype=torch.bfloat16), plan, stack)
    torch.cuda.synchronize()
    assert got.shape == (6, 32)


def test_float32_takes_the_reference() -> None:
    stack = random_stack(4, 64, 128)
    plan = on_device(blocks_of(random_ids(50, 4, 2), range(4), 128))
    x = torch.randn(50, 128, device="cuda")
    got = gate_up(x, plan, stack)
    assert got.dtype == torch.float32
    assert_close(got, expected(x, plan, stack, gated=True))


def test_this_device_has_a_tile() -> None:
    capability, smem, _ = limits(torch.device("cuda", 0))
    assert tile_for(capability, smem, 128) is not None
