"""Routing against the words of the papers, in float64, and against transformers through whole models elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.routing import route_sigmoid, route_softmax


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax(normalise: bool) -> None:
    logits = torch.randn(50, 16)
    weights, ids = route_softmax(logits, 4, normalise=normalise)
    probs = logits.double().softmax(-1)
    for t in range(50):
        best = sorted(range(16), key=lambda e: -float(probs[t, e]))[:4]
        assert set(ids[t].tolist()) == set(best)
        total = float(probs[t, best].sum()) if normalise else 1.0
        torch.testing.assert_close(weights[t], (probs[t, ids[t]] / total).float())


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10**6),
    num_groups=st.sampled_from([1, 2, 4]),
    topk_groups=st.integers(1, 4),
    normalise=st.booleans(),
    biased=st.booleans(),
)
def test_sigmoid_bias_chooses_and_never_weighs(
    seed: int, num_groups: int, topk_groups: int, normalise: bool, biased: bool
) -> None:
    topk_groups = min(topk_groups, num_groups)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, 16, generator=generator)
    # Strongly negative biases: an expert of a closed group must not be chosen even where all open ones score below 0.
    bias = torch.randn(16, generator=generator) * 3 - 2 if biased else None
    top_k = min(4, 16 // num_groups * topk_groups)
    weights, ids = route_sigmoid(
        logits, bias, top_k, num_groups=num_groups, topk_groups=topk_groups, normalise=normalise, scale=2.5
    )
    for t in range(20):
        score = logits[t].sigmoid()
        choice = score if bias is None else score + bias
        size = 16 // num_groups
        groups = [sorted(choice[g * size : (g + 1) * size].tolist(), reverse=True) for g in range(num_groups)]
        opened = sorted(range(num_groups), key=lambda g: -sum(groups[g][:2]))[:topk_groups]
        allowed = [e for g in opened for e in range(g * size, (g + 1) * size)]
        best = sorted(allowed, key=lambda e: -float(choice[e]))[:top_k]
        assert set(ids[t].tolist()) == set(best)
        expected = score[ids[t]]
        expected = expected / expected.sum() if normalise else expected
        torch.testing.assert_close(weights[t], expected * 2.5, rtol=1e-5, atol=1e-6)
