"""Kernels that start before the one before them has ended, Triton's between them: a graph against one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.kernels import int4_experts, latent
from headrace.kernels.activation import silu_mul
from headrace.kernels.argmax import argmax
from headrace.kernels.combine import combine
from headrace.kernels.dispatch import route_and_plan
from headrace.kernels.few_tokens import choose_tiles, product
from headrace.kernels.int4_experts import Fragments
from headrace.kernels.mla_attention import mla_decode
from headrace.kernels.norm import add_rms_norm, rms_norm

pytestmark = pytest.mark.gpu

HEADS, EXPERTS, TOP_K, LAYERS, PAGES, SIZE = 32, 64, 4, 6, 64, 64
HIDDEN, INTER, Q_LORA, RANK, ROPE = 1024, 256, 512, 512, 64
BLOCK = 8
"""Most pairs of a block of the plan."""


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def experts(rows: int, columns: int) -> Fragments:
    """INT4 weights in fragment order, of a size that keeps a product's."""
    tiles = (EXPERTS, rows // int4_experts.ROWS, columns // int4_experts.COLUMNS)
    words = torch.randint(0, 256, (*tiles, 32, 16), device="cuda", dtype=torch.uint8).view(torch.int32)
    scales = (0.1 + 0.2 * torch.rand(*tiles, 8, 2, 2, device="cuda")) * columns**-0.5
    return Fragments(words, scales.bfloat16())


class Chain:
    """Layers that are nothing but kernels of ours, each reading what the one before wrote."""

    def __init__(self, tokens: int) -> None:
        angles = torch.randn(4096, 1, ROPE // 2, device="cuda").repeat(1, 1, 2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.x = randn(tokens, HIDDEN)
        self.slots = torch.arange(tokens, dtype=torch.int32, device="cuda")
        self.table = torch.arange(PAGES, dtype=torch.int32, device="cuda").view(-1, 4).contiguous()
        self.start = torch.randint(1, 255, (tokens,), device="cuda", dtype=torch.int32)
        self.positions = self.start.long()
        self.place = self.slots.long() * 4 * SIZE + self.positions
        self.caches = [randn(PAGES, SIZE, RANK + ROPE) for _ in range(LAYERS)]
        shapes = {
            "a": (Q_LORA + RANK + ROPE, HIDDEN), "q": (HEADS * (128 + ROPE), Q_LORA), "o": (HIDDEN, HEADS * 128),
            "router": (EXPERTS, HIDDEN), "up": (2 * INTER, HIDDEN), "down": (HIDDEN, INTER),
        }  # fmt: skip
        assert all(choose_tiles(tokens, *shape) for shape in shapes.values())  # products of ours, not the library's
        self.weights = [{n: randn(*s) * s[1] ** -0.5 for n, s in shapes.items()} for _ in range(LAYERS)]
        self.experts = [(experts(2 * INTER, HIDDEN), experts(HIDDEN, INTER)) for _ in range(LAYERS)]
        self.kv_b = [randn(HEADS, 256, RANK) * 0.05 for _ in range(LAYERS)]
        self.norms = [tuple(randn(n) for n in (HIDDEN, Q_LORA, RANK, HIDDEN)) for _ in range(LAYERS)]
        torch.cuda.synchronize()

    def __call__(self, between: Callable[[], object]) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.x
        h = rms_norm(total, self.norms[0][0], 1e-6)
        for layer, norms in enumerate(self.norms):
            h, total = add_rms_norm(total, self.attention(layer, h, between), norms[3], 1e-6)
            between()
            h, total = add_rms_norm(total, self.moe(layer, h, between), norms[0], 1e-6)
        between()
        return total, argmax(total)[0]

    def attention(self, layer: int, h: torch.Tensor, between: Callable[[], object]) -> torch.Tensor:
        w, kv_b, cache, norms = self.weights[layer], self.kv_b[layer], self.caches[layer], self.norms[layer]
        between()
        a = product(h, w["a"], None)
        between()
        q = latent.prepare_latent(
            a, norms[1], norms[2], 1e-6, self.cos, self.sin, self.positions, self.place, cache, True
        )
        between()
        q = product(q, w["q"], None).view(len(h), HEADS, -1)
        between()
        q = latent.absorb_query(q, kv_b[:, :128], self.cos, self.sin, self.positions, True)
        between()
        o = mla_decode(q, cache, self.slots, self.start, self.table, RANK, 192**-0.5, 4)
        between()
        o = latent.expand_value(o, kv_b[:, 128:].transpose(1, 2))
        between()
        o = product(o, w["o"], None)
        between()
        return o

    def moe(self, layer: int, h: torch.Tensor, between: Callable[[], object]) -> torch.Tensor:
        w, (gate_up, down) = self.weights[layer], self.experts[layer]
        logits = product(h, w["router"], None, torch.float32)
        between()
        weights, ids, plan = route_and_plan(
            logits, None, TOP_K, range(EXPERTS), BLOCK, softmax=False, normalise=True, scale=1.0
        )
        between()
        inner = int4_experts.gate_up(h, plan, gate_up)
        between()
        y = int4_experts.down(inner, plan, down, follows_gate_up=True)
        between()
        shared = product(h, w["up"], None)
        between()
        shared = silu_mul(shared)
        between()
        shared = product(shared, w["down"], None)
        between()
        y = combine(y, weights, ids, range(EXPERTS), shared)
        between()
        return y


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_a_chain_in_a_graph_is_each_kernel_alone(tokens: int) -> None:
    torch.manual_seed(tokens)
    chain = Chain(tokens)
    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda: None)
    for _ in range(5):
        chain.x.copy_(randn(tokens, HIDDEN))
        expected = [x.clone() for x in chain(torch.cuda.synchronize)]
        for _ in range(10):
            for x in got:
                x.zero_()
            graph.replay()
            for x, y in zip(got, expected, strict=True):
                assert torch.equal(x, y)
