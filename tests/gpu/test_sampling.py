"""Sampling kernels on a GPU against their references on the same device, with K2's vocabulary and odd ones."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.argmax import argmax, argmax_reference
from headrace.kernels.sampling import sample, sample_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def knobs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """temperature, top_k, top_p, min_p, noise, each from a set with the corners in it."""

    def pick(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,))].cuda()

    noise = torch.rand(rows, dtype=torch.float64, device="cuda")
    return (
        pick([0.0, 0.3, 1.0, 1.0, 2.0]),
        pick([0, 0, 1, 20, 1000, 10**6]).int(),
        pick([0.0, 0.5, 0.9, 0.95, 1.0]),
        pick([0.0, 0.0, 0.05, 1.0]),
        noise,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 163840), (7, 151936), (256, 163840), (3, 1000), (2, 50257)])
def test_argmax(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, vocab, device="cuda").to(dtype)  # in bf16 the best is often not alone
    if rows > 2:
        logits[0, vocab // 2] = float("nan")
        logits[1, vocab - 1] = float("inf")
        logits[2] = float("-inf")
    tokens, sound = argmax(logits)
    expected, expected_sound = argmax_reference(logits)
    assert torch.equal(sound, expected_sound)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties"])
@pytest.mark.parametrize(("rows", "vocab"), [(64, 163840), (5, 50257), (3, 777)])
def test_sample(rows: int, vocab: int, kind: str) -> None:
    logits = torch.randn(rows, vocab, device="cuda") * {"peaked": 4.0, "flat": 0.1, "ties": 2.0}[kind]
    if kind == "ties":
        logits = logits.bfloat16()
    chosen = knobs(rows)
    tokens, sound = sample(logits, *chosen)
    expected, _ = sample_reference(logits, *chosen)
    assert sound.all()
    off = (tokens != expected).nonzero().flatten().tolist()
    # Sums rounded otherwise move a boundary by a millionth of the mass, and so by a token, now and then.
    assert len(off) <= 1 + rows // 8, (tokens, expected)


def test_draws_follow_the_distribution() -> None:
    rows, vocab = 4096, 200
    logits = (torch.randn(vocab, device="cuda") * 2).repeat(rows, 1)
    ones, noise = torch.ones(rows, device="cuda"), torch.rand(rows, dtype=torch.float64, device="cuda")
    top_k = torch.full((rows,), 20, dtype=torch.int32, device="cuda")
    tokens, _ = sample(logits, ones, top_k, ones, ones * 0, noise)
    probs = logits[0].softmax(-1)
    probs = torch.where(probs >= probs.topk(20).values[-1], probs, 0.0)
    counts, expected = torch.bincount(tokens, minlength=vocab), probs / probs.sum() * rows
    assert (counts[expected == 0] == 0).all()
    held = expected > 5
    assert float(((counts - expected) ** 2 / expected)[held].sum()) < 20 + 5 * 40**0.5


def test_captured() -> None:
    logits = torch.randn(8, 5000, device="cuda")
    chosen = knobs(8)
    sample(logits, *chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, sound = sample(logits, *chosen)
        best = argmax(logits)[0]
    for trial in range(4):
        logits.copy_(torch.randn(8, 5000, device="cuda") * 3)
        if trial == 3:
            logits[5, 17] = float("nan")
        for knob, fresh in zip(chosen, knobs(8), strict=True):
            knob.copy_(fresh)
        graph.replay()
        expected, expected_sound = sample_reference(logits, *chosen)
        assert torch.equal(best, argmax_reference(logits)[0]) and torch.equal(sound, expected_sound)
        assert int((tokens != expected).sum()) <= 1
