"""Routing, plans, grouped products and the combine on a GPU, against float64 and the references on the same device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels import grouped
from headrace.kernels.combine import combine, combine_reference
from headrace.kernels.dispatch import ExpertPlan, plan_experts, plan_reference, route_and_plan
from headrace.kernels.routing import UniformRouting, route_sigmoid, route_softmax
from headrace.weights.formats import dequantise, quantise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def choices(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k, dim=-1).indices.int()


def poison() -> None:
    """Fill what the allocator hands out next with NaN."""
    torch.full((1 << 26,), float("nan"), device="cuda")


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def same_choice(weights: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, expected: torch.Tensor) -> None:
    """Distinct ids whose scores are the best (ids may differ where scores are equal but for rounding)."""
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    chosen, best = scores.gather(-1, ids.long()), scores.gather(-1, expected.to(ids.device).long())
    torch.testing.assert_close(chosen, best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 33, 129])
@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "opened"), [(384, 8, 1, 1), (256, 8, 8, 4), (60, 6, 3, 2), (1024, 16, 1, 1)]
)
def test_route_sigmoid(tokens: int, experts: int, top_k: int, groups: int, opened: int) -> None:
    logits, bias = torch.randn(tokens, experts, device="cuda"), torch.randn(experts, device="cuda")
    options = {"num_groups": groups, "topk_groups": opened, "normalise": True, "scale": 2.5}
    weights, ids = route_sigmoid(logits, bias, top_k, **options)  # type: ignore[arg-type]
    expected = route_sigmoid(logits.cpu(), bias.cpu(), top_k, **options)  # type: ignore[arg-type]
    same_choice(weights, ids, logits.sigmoid() + bias, expected[1])
    torch.testing.assert_close(weights.sum(-1), torch.full_like(weights[:, 0], 2.5))
    fused_weights, fused_ids, plan = route_and_plan(
        logits, bias, top_k, range(experts), 8, softmax=False, **options  # type: ignore[arg-type]
    )  # fmt: skip
    same_choice(fused_weights, fused_ids, logits.sigmoid() + bias, expected[1])
    # Equal but for rounding, two experts may change places.
    apart = [torch.zeros_like(logits).scatter_(1, i.long(), w) for w, i in ((weights, ids), (fused_weights, fused_ids))]
    torch.testing.assert_close(*apart, rtol=1e-4, atol=1e-5)
    same_plan(plan, plan_reference(fused_ids, range(experts), 8))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("tokens", [1, 100])
def test_route_softmax(tokens: int, normalise: bool) -> None:
    logits = torch.randn(tokens, 128, device="cuda")
    weights, ids = route_softmax(logits, 8, normalise=normalise)
    expected = route_softmax(logits.cpu(), 8, normalise=normalise)
    same_choice(weights, ids, logits.softmax(-1), expected[1])
    torch.testing.assert_close(weights.cpu(), expected[0], rtol=1e-4, atol=1e-6)
    fused, fused_ids, _ = route_and_plan(logits, None, 8, range(128), 8, softmax=True, normalise=normalise)
    torch.testing.assert_close(fused, weights, rtol=1e-4, atol=1e-6)
    same_choice(fused, fused_ids, logits.softmax(-1), expected[1])


@pytest.mark.parametrize("fused", [False, True])
def test_uniform_routing_is_fresh_in_every_replay(fused: bool) -> None:
    tokens, experts, top_k = 128, 384, 8
    logits = torch.randn(tokens, experts, device="cuda")
    pads = torch.arange(tokens, device="cuda") - 3  # the first three are pads
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")

    def route() -> tuple[torch.Tensor, torch.Tensor]:
        uniform = UniformRouting(counter, 7)
        if fused:
            return route_and_plan(
                logits, None, top_k, range(experts), 8, softmax=False, normalise=False, pads=pads, uniform=uniform
            )[:2]
        return route_sigmoid(
            logits, None, top_k, num_groups=1, topk_groups=1, normalise=False, scale=1.0, pads=pads, uniform=uniform
        )

    route()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = route()
    counts, seen = torch.zeros(experts, device="cuda"), set()
    for _ in range(40):
        counter += 1
        graph.replay()
        assert (ids[:3] == -1).all() and (weights[:3] == 0).all()
        assert (ids[3:].sort(-1).values.diff(dim=-1) > 0).all()
        torch.testing.assert_close(weights[3:], logits.sigmoid().gather(-1, ids.clamp(min=0).long())[3:])
        counts += torch.bincount(ids[3:].flatten(), minlength=experts)
        seen.add(tuple(ids[3:6].flatten().tolist()))
    assert len(seen) == 40
    expected = 40 * (tokens - 3) * top_k / experts
    assert float(((counts - expected) ** 2 / expected).sum()) < experts + 5 * (2 * experts) ** 0.5


def same_plan(got: ExpertPlan, expected: ExpertPlan) -> None:
    count, pairs = int(expected.num_blocks), int((expected.rows >= 0).sum())
    assert int(got.num_blocks) == count and got.max_blocks == expected.max_blocks
    assert torch.equal(got.rows[:pairs], expected.rows[:pairs].to(got.rows.device))
    for name in ("block_expert", "block_first", "block_count"):
        expected_array = getattr(expected, name)[:count]
        assert torch.equal(getattr(got, name)[:count], expected_array.to(got.rows.device)), name


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 384, 8), (7, 384, 8), (128, 384, 8), (1000, 128, 4), (8192, 384, 8), (99, 1000, 6)],
)
@pytest.mark.parametrize("block", [8, 128])
def test_plan(tokens: int, experts: int, top_k: int, block: int) -> None:
    for held in (range(experts), range(experts // 2, experts)):
        ids = choices(tokens, experts, top_k)
        ids[tokens // 2 :: 7] = -1
        same_plan(plan_experts(ids, held, block), plan_reference(ids, held, block))
    ids = torch.full_like(ids, experts - 1)  # all to one expert
    same_plan(plan_experts(ids, held, block), plan_reference(ids, held, block))


@pytest.mark.parametrize("tokens", [1, 5, 130])
@pytest.mark.parametrize(("hidden", "top_k"), [(7168, 8), (2048, 8), (1000, 3)])
def test_combine(tokens: int, hidden: int, top_k: int) -> None:
    held = range(8, 40)
    ids, weights = choices(tokens, 64, top_k), torch.rand(tokens, top_k, device="cuda")
    ids[tokens // 2 :: 3] = -1
    y = torch.randn(tokens * top_k, hidden, device="cuda").bfloat16()
    y[~((ids >= held.start) & (ids < held.stop)).flatten()] = float("nan")
    for shared in (None, torch.randn(tokens, hidden, device="cuda").bfloat16()):
        poison()
        got = combine(y, weights, ids, held, shared)
        torch.testing.assert_close(got, combine_reference(y, weights, ids, held, shared), rtol=1e-2, atol=1e-2)


def float64_of(
    x: torch.Tensor, ids: torch.Tensor, held: range, weight: torch.Tensor, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 and which pairs have one."""
    flat, per_token = ids.flatten(), ids.shape[1] if gated else 1
    width = weight.shape[1] // (2 if gated else 1)
    out = torch.zeros(flat.numel(), width, dtype=torch.float64, device="cuda")
    for expert in held:
        pairs = (flat == expert).nonzero().flatten()
        y = x[pairs // per_token].double() @ weight[expert - held.start].double().T
        out[pairs] = F.silu(y[:, :width]) * y[:, width:] if gated else y
    return out, (flat >= held.start) & (flat < held.stop)


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize(("tokens", "block"), [(1, 8), (9, 8), (40, 16), (300, 64), (900, 128)])
@pytest.mark.parametrize(("hidden", "width"), [(2048, 768), (160, 96), (7168, 256)])
def test_grouped(tokens: int, block: int, hidden: int, width: int, int4: bool) -> None:
    held, top_k = range(2, 12), 4
    ids = choices(tokens, 16, top_k)
    ids[tokens // 2 :: 5] = -1
    plan = plan_experts(ids, held, block)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    inner = torch.randn(tokens * top_k, width, device="cuda").bfloat16()
    up = torch.randn(10, 2 * width, hidden, device="cuda") * hidden**-0.5
    down = torch.randn(10, hidden, width, device="cuda") * width**-0.5
    poison()
    if int4:
        packed_up, packed_down = quantise(up, 32), quantise(down, 32)
        got_inner, got = grouped.gate_up_int4(x, plan, *packed_up), grouped.down_int4(inner, plan, *packed_down)
        up, down = (dequantise(*packed, torch.float32) for packed in (packed_up, packed_down))
    else:
        up, down = up.bfloat16(), down.bfloat16()
        got_inner, got = grouped.gate_up(x, plan, up), grouped.down(inner, plan, down)
    for result, rows, weight, gated in ((got_inner, x, up, True), (got, inner, down, False)):
        wanted, mine = float64_of(rows, ids, held, weight, gated)
        assert result.dtype == torch.bfloat16
        if mine.any():
            assert error(result[mine], wanted[mine]) < 1e-2


def test_a_captured_layer_follows_its_inputs() -> None:
    tokens, experts, hidden, width, top_k = 12, 32, 512, 256, 4
    held = range(8, 32)
    up = (torch.randn(24, 2 * width, hidden, device="cuda") * hidden**-0.5).bfloat16()
    down = (torch.randn(24, hidden, width, device="cuda") * width**-0.5).bfloat16()
    x, logits = torch.randn(tokens, hidden, device="cuda").bfloat16(), torch.randn(tokens, experts, device="cuda")
    pads = torch.zeros(tokens, dtype=torch.int64, device="cuda")

    def layer() -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids, plan = route_and_plan(
            logits, None, top_k, held, 8, softmax=True, normalise=True, scale=1.0, pads=pads
        )
        y = grouped.down(grouped.gate_up(x, plan, up), plan, down)
        return combine(y, weights, ids, held, x), ids

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, ids = layer()
    for trial in range(3):
        x.copy_(torch.randn(tokens, hidden, device="cuda"))
        logits.copy_(torch.randn(tokens, experts, device="cuda"))
        pads.copy_(torch.arange(tokens, device="cuda") - trial * 4)
        graph.replay()
        assert (ids[: trial * 4] == -1).all() and (ids[trial * 4 :] >= 0).all()
        probs = logits.double().softmax(-1)
        expected = x.double().clone()
        for t in range(trial * 4, tokens):
            chosen = ids[t].long()
            share = probs[t, chosen] / probs[t, chosen].sum()
            for weight, expert in zip(share, chosen.tolist(), strict=True):
                if expert in held:
                    gate, rest = (up[expert - 8].double() @ x[t].double()).chunk(2)
                    expected[t] += weight * (down[expert - 8].double() @ (F.silu(gate) * rest))
        assert error(out, expected) < 1e-2
