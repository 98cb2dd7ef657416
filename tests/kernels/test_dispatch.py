"""The CUDA C++ of dispatch, emulated thread by thread on the CPU, against the PyTorch and Triton references."""

from __future__ import annotations

import ctypes

import pytest
import torch

from headrace.kernels.dispatch import SOURCE, ExpertPlan, _empty_plan, _tensors, plan_reference
from headrace.kernels.routing import UniformRouting, launch_route, route_sigmoid
from tests.kernels.emulated import emulated, needs_compiler

CPU = torch.device("cpu")

pytestmark = needs_compiler


def on_cpu(**macros: int) -> ctypes.CDLL:
    return emulated("dispatch_on_cpu.cpp", SOURCE, macros.items())


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def same(got: ExpertPlan, expected: ExpertPlan) -> None:
    count, pairs = int(expected.num_blocks), int((expected.rows >= 0).sum())
    assert int(got.num_blocks) == count
    assert torch.equal(got.rows[:pairs], expected.rows[:pairs])
    for name in ("block_expert", "block_first", "block_count"):
        assert torch.equal(getattr(got, name)[:count], getattr(expected, name)[:count]), name


@pytest.mark.parametrize("wide", [0, 1])
def test_plan(wide: int) -> None:
    run = on_cpu(WARPS=4, WIDE=wide).run_plan
    for tokens, top_k, experts, held, block in (
        (1, 8, 384, range(384), 8),
        (3, 8, 384, range(192, 384), 8),
        (64, 6, 500, range(500), 16),
        (37, 3, 7, range(2, 5), 8),
        (200, 2, 5, range(5), 64),
    ):
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
        ids[tokens // 2 :: 3] = -1
        plan = _empty_plan(ids.numel(), len(held), block, CPU)
        run(address(ids), ids.numel(), held.start, len(held), block, *map(address, _tensors(plan)))
        same(plan, plan_reference(ids, held, block))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("experts", "top_k", "softmax", "normalise", "held"),
    [(384, 8, False, True, range(100, 300)), (20, 3, True, False, range(20))],
)
def test_route_plan(experts: int, top_k: int, softmax: bool, normalise: bool, held: range) -> None:
    run = on_cpu(
        WARPS=4,
        WIDE=0,
        EXPERTS=experts,
        TOP_K=top_k,
        SOFTMAX=int(softmax),
        NORMALISE=int(normalise),
    ).run_route_plan
    for tokens in (1, 4, 9):  # alone in a block, a full one, several
        for counter in (None, torch.tensor([2**40 + 5])):
            logits, bias = torch.randn(tokens, experts), None if softmax else torch.randn(experts)
            pads = torch.arange(tokens) - (tokens > 1) * 3
            weights, ids = torch.empty(tokens, top_k), torch.empty(tokens, top_k, dtype=torch.int32)
            plan = _empty_plan(tokens * top_k, len(held), 8, CPU)
            tensors = map(address, (logits, bias, pads, counter))
            run(
                *tensors, 5, ctypes.c_float(2.5), tokens, address(weights), address(ids),
                held.start, len(held), 8, *map(address, _tensors(plan)),
            )  # fmt: skip
            expected = launch_route(
                logits,
                bias,
                top_k,
                softmax=softmax,
                normalise=normalise,
                scale=2.5,
                pads=pads,
                uniform=None if counter is None else UniformRouting(counter, 5),
            )
            assert torch.equal(ids, expected[1])
            torch.testing.assert_close(weights, expected[0])
            same(plan, plan_reference(ids, held, 8))


def test_route_plan_breaks_ties_by_id() -> None:
    run = on_cpu(WARPS=1, WIDE=0, EXPERTS=40, TOP_K=4, SOFTMAX=0, NORMALISE=1).run_route_plan
    logits, pads = torch.zeros(1, 40), None
    weights, ids = torch.empty(1, 4), torch.empty(1, 4, dtype=torch.int32)
    plan = _empty_plan(4, 40, 8, CPU)
    run(
        *map(address, (logits, None, pads, None)), 0, ctypes.c_float(1.0), 1, address(weights), address(ids),
        0, 40, 8, *map(address, _tensors(plan)),
    )  # fmt: skip
    assert ids.tolist() == [[0, 1, 2, 3]]
    expected = route_sigmoid(logits, None, 4, num_groups=1, topk_groups=1, normalise=True, scale=1.0)[0]
    torch.testing.assert_close(weights, expected)
