"""Routing, plans, grouped products and the combine: their Triton kernels in the interpreter, and their references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import grouped
from headrace.kernels.combine import combine, combine_reference, launch_combine
from headrace.kernels.dispatch import ExpertPlan, max_blocks, plan_experts, route_and_plan
from headrace.kernels.experts import grouped_experts
from headrace.kernels.routing import UniformRouting, launch_route, route_sigmoid, route_softmax
from headrace.weights.formats import quantise


class Matrices:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        return self.weights[expert].to(dtype)


def choices(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "opened", "biased"),
    [(16, 4, 1, 1, True), (24, 3, 1, 1, False), (24, 4, 3, 2, True), (64, 8, 8, 4, True), (384, 8, 1, 1, True)],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_route_sigmoid(experts: int, top_k: int, groups: int, opened: int, biased: bool, normalise: bool) -> None:
    logits, bias = torch.randn(5, experts), torch.randn(experts) if biased else None
    pads = torch.tensor([0, -1, 7, 8, 9])
    weights, ids = route_sigmoid(
        logits, bias, top_k, num_groups=groups, topk_groups=opened, normalise=normalise, scale=2.5, pads=pads
    )
    got_weights, got_ids = launch_route(
        logits,
        bias,
        top_k,
        softmax=False,
        num_groups=groups,
        topk_groups=opened,
        normalise=normalise,
        scale=2.5,
        pads=pads,
    )
    assert torch.equal(ids.int(), got_ids)
    torch.testing.assert_close(got_weights, weights)
    assert (ids[1] == -1).all() and (weights[1] == 0).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("normalise", [True, False])
def test_route_softmax(normalise: bool) -> None:
    logits = torch.randn(6, 20)
    weights, ids = route_softmax(logits, 4, normalise=normalise)
    got_weights, got_ids = launch_route(logits, None, 4, softmax=True, normalise=normalise, scale=1.0)
    assert torch.equal(ids.int(), got_ids)
    torch.testing.assert_close(got_weights, weights)


@pytest.mark.interpreted
def test_ties_go_to_the_lowest_id_and_nan_stays_in_range() -> None:
    logits = torch.zeros(2, 20)
    logits[1] = float("nan")
    ids = launch_route(logits, None, 5, softmax=False, normalise=True, scale=1.0)[1]
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


def check_uniform(ids: torch.Tensor, experts: int) -> None:
    """Distinct, and no expert more or less often than chance allows."""
    tokens, top_k = ids.shape
    assert all(len(set(row)) == top_k for row in ids.tolist())
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    assert len(counts) == experts
    expected = tokens * top_k / experts
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < experts + 5 * (2 * experts) ** 0.5


def test_uniform_routing_of_the_reference() -> None:
    logits, counter = torch.randn(2000, 24), torch.tensor([5])

    def chosen(layer: int) -> torch.Tensor:
        ids: torch.Tensor = route_softmax(logits, 4, normalise=True, uniform=UniformRouting(counter, layer))[1]
        return ids

    first = chosen(0)
    check_uniform(first, 24)
    assert torch.equal(first, chosen(0))
    assert not torch.equal(first, chosen(1))
    counter += 1
    assert not torch.equal(first, chosen(0))


@pytest.mark.interpreted
def test_uniform_routing() -> None:
    logits, counter = torch.randn(24, 12), torch.tensor([2**40])

    def route(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return launch_route(
            logits,
            None,
            4,
            softmax=False,
            normalise=False,
            scale=1.0,
            uniform=UniformRouting(counter, layer),
        )

    weights, ids = route(3)
    check_uniform(ids, 12)
    torch.testing.assert_close(weights, logits.sigmoid().gather(-1, ids.long()))
    assert torch.equal(ids, route(3)[1])
    assert not torch.equal(ids, route(4)[1])
    counter += 1
    assert not torch.equal(ids, route(3)[1])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "held", "block"),
    [(1, 8, 384, range(384), 8), (40, 8, 64, range(32, 64), 4), (9, 2, 3, range(1, 2), 8), (70, 2, 4, range(4), 16)],
)
def test_plan(tokens: int, top_k: int, experts: int, held: range, block: int) -> None:
    ids = choices(tokens, experts, top_k)
    ids[tokens // 2 :: 5] = -1
    plan = plan_experts(ids, held, block)
    check_plan(plan, ids, held)


def check_plan(plan: ExpertPlan, ids: torch.Tensor, held: range) -> None:
    count = int(plan.num_blocks)
    assert count <= plan.max_blocks == max_blocks(ids.numel(), len(held), plan.block)
    found: list[tuple[int, int]] = []
    last = -1
    for expert, first, size in zip(
        *(a[:count].tolist() for a in (plan.block_expert, plan.block_first, plan.block_count)), strict=True
    ):
        assert 1 <= size <= plan.block and expert >= last and first == len(found)
        last = expert
        found += [(expert, pair) for pair in plan.rows[first : first + size].tolist()]
    local = enumerate((ids.flatten() - held.start).tolist())
    assert found == sorted((expert, pair) for pair, expert in local if 0 <= expert < len(held))


def test_route_and_plan_is_both() -> None:
    logits, bias, pads = torch.randn(7, 16), torch.randn(16), torch.tensor([1, 2, -1, 3, 4, 5, -1])
    weights, ids, plan = route_and_plan(
        logits, bias, 4, range(4, 12), 2, softmax=False, normalise=True, scale=2.0, pads=pads
    )
    expected = route_sigmoid(logits, bias, 4, num_groups=1, topk_groups=1, normalise=True, scale=2.0, pads=pads)
    assert torch.equal(weights, expected[0]) and torch.equal(ids, expected[1])
    check_plan(plan, ids, range(4, 12))


@pytest.mark.interpreted
@pytest.mark.parametrize("shared", [True, False])
def test_combine_reads_nothing_that_is_not_held(shared: bool) -> None:
    ids = choices(6, 8, 3)
    ids[2] = -1
    y, weights = torch.randn(18, 40), torch.rand(6, 3)
    held = range(2, 6)
    y[~((ids >= 2) & (ids < 6)).flatten()] = float("nan")
    extra = torch.randn(6, 40) if shared else None
    expected = combine_reference(y, weights, ids, held, extra)
    assert expected.isfinite().all()
    torch.testing.assert_close(launch_combine(y, weights, ids.int(), held, extra, block=32), expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize(("tokens", "block", "hidden", "width"), [(5, 4, 96, 32), (12, 16, 64, 96)])
def test_grouped_products(int4: bool, tokens: int, block: int, hidden: int, width: int) -> None:
    ids, held = choices(tokens, 6, 2), range(1, 5)
    ids[2] = -1
    plan = plan_experts(ids, held, block)
    x, tile = torch.randn(tokens, hidden), grouped.Tile(32, 64, 2, 4)
    up, down = torch.randn(4, 2 * width, hidden) * 0.1, torch.randn(4, hidden, width) * 0.1
    mine = ((ids >= 1) & (ids < 5)).flatten()
    if int4:
        packed, scales = zip(quantise(up, 32), quantise(down, 32), strict=True)
        inner = grouped.gate_up_int4(x, plan, packed[0], scales[0])
        y = grouped.down_int4(inner, plan, packed[1], scales[1])
        got_inner = grouped.launch_grouped(x, plan, packed[0], scales[0], gated=True, tile=tile)
        got = grouped.launch_grouped(inner, plan, packed[1], scales[1], gated=False, tile=tile)
    else:
        inner = grouped.gate_up(x, plan, up)
        y = grouped.down(inner, plan, down)
        got_inner = grouped.launch_grouped(x, plan, up, None, gated=True, tile=tile)
        got = grouped.launch_grouped(inner, plan, down, None, gated=False, tile=tile)
    torch.testing.assert_close(got_inner[mine], inner[mine], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[mine], y[mine], rtol=1e-4, atol=1e-5)


def test_the_parts_together_are_the_reference() -> None:
    ids, weights, held = choices(20, 8, 3), torch.rand(20, 3), range(2, 7)
    ids[3] = -1
    x, up, down = torch.randn(20, 32), torch.randn(5, 2 * 48, 32) * 0.2, torch.randn(5, 32, 48) * 0.2
    plan = plan_experts(ids, held, 4)
    y = grouped.down(grouped.gate_up(x, plan, up), plan, down)
    expected = grouped_experts(x, weights, ids, Matrices(up), Matrices(down), held)
    torch.testing.assert_close(combine(y, weights, ids, held), expected, rtol=1e-4, atol=1e-5)
    one = next(pair for pair in range(60) if int(ids.flatten()[pair]) in held)
    expert = int(ids.flatten()[one]) - 2
    gate, rest = (up[expert] @ x[one // 3]).chunk(2)
    torch.testing.assert_close(y[one], down[expert] @ (F.silu(gate) * rest), rtol=1e-4, atol=1e-5)


def test_tiles_fit_both_devices() -> None:
    for smem in (232448, 101376):
        for block in (8, 16, 32, 64, 128):
            for gated in (False, True):
                for int4 in (False, True):
                    tile = grouped.tile_for(block, gated, int4, smem)
                    assert tile.smem(max(16, block), 1 + gated, 4 if int4 else 16) <= smem
