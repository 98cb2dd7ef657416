from __future__ import annotations

import numpy as np
import pytest

from headrace.kernels.expert_products import FEW
from headrace.plan.experts import Routing, Skewed, Uniform
from headrace.plan.reserve import FEW_PAIRS
from headrace.spec import MoeSpec

K2 = MoeSpec(num_experts=384, top_k=8, intermediate=2048)


def test_distinct_experts_of_one_rank_are_the_formula() -> None:
    assert Uniform().distinct(K2, 1, 1) == pytest.approx(8)
    assert Uniform().distinct(K2, 4, 1) == pytest.approx(384 * (1 - (1 - 8 / 384) ** 4))
    assert Uniform().distinct(K2, 8192, 1) == pytest.approx(384)


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (1, 8), (16, 4), (128, 8)])
def test_the_fullest_rank_of_k2_against_draws(tokens: int, ranks: int) -> None:
    source = np.random.default_rng(1)
    most = []
    for _ in range(400):
        chosen = source.random((tokens, 384)).argpartition(8, axis=1)[:, :8]
        most.append(np.bincount(np.unique(chosen) // (384 // ranks), minlength=ranks).max())
    assert Uniform().distinct(K2, tokens, ranks) == pytest.approx(float(np.mean(most)), rel=0.02)


def test_all_experts_are_touched_in_the_end() -> None:
    assert Uniform().distinct(K2, 10_000, 8) == pytest.approx(48)
    assert Skewed().distinct(K2, 1_000_000, 8) == pytest.approx(48)


@pytest.mark.parametrize("routing", [Uniform(), Skewed(), Skewed(1.0)])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_fullest_rank_has_a_fair_share_at_least_and_never_fewer_with_more_tokens(
    routing: Routing, ranks: int
) -> None:
    before = 0.0
    for tokens in (1, 2, 7, 32, 200, 1000):
        found = routing.distinct(K2, tokens, ranks)
        assert found >= routing.distinct(K2, tokens, 1) / ranks - 1e-9
        assert before <= found <= 384 / ranks + 1e-9
        assert tokens * 8 / ranks - 1e-9 <= routing.pairs(K2, tokens, ranks) <= tokens * 8
        before = found


def test_skew_touches_fewer_experts() -> None:
    alike, skewed, more = (routing.distinct(K2, 64, 1) for routing in (Uniform(), Skewed(), Skewed(1.0)))
    assert more < skewed < alike
    assert Skewed(0.0).distinct(K2, 64, 1) == pytest.approx(alike, rel=0.02)


def test_skewed_popularity_against_draws_by_weight() -> None:
    weights = np.arange(1, 385) ** -0.5
    source = np.random.default_rng(2)
    rings = source.exponential(1 / weights, (300, 32, 384))
    chosen = rings.argpartition(8, axis=2)[:, :, :8]
    drawn = np.mean([len(np.unique(step)) for step in chosen])
    assert Skewed(0.5).distinct(K2, 32, 1) == pytest.approx(drawn, rel=0.01)


def test_two_ranks_of_one_expert() -> None:
    """Each is touched with 1/2, as if independently: in three of four cases one at least."""
    assert Uniform().distinct(MoeSpec(num_experts=2, top_k=1, intermediate=8), 1, 2) == pytest.approx(0.75)


def test_a_token_that_chooses_all() -> None:
    dense = MoeSpec(num_experts=4, top_k=4, intermediate=8)
    assert Uniform().distinct(dense, 1, 2) == pytest.approx(2)
    assert Skewed().distinct(dense, 1, 2) == pytest.approx(2)


@pytest.mark.parametrize("tokens", [8, 64, 256])
def test_blocks_of_an_expert_against_draws(tokens: int) -> None:
    source = np.random.default_rng(2)
    found = []
    for _ in range(200):
        chosen = source.random((tokens, 384)).argpartition(8, axis=1)[:, :8]
        counts = np.bincount(chosen.ravel(), minlength=384)
        found.append(np.ceil(counts / 8).sum() / (counts > 0).sum())
    assert Uniform().blocks(K2, tokens, 8) == pytest.approx(float(np.mean(found)), rel=0.01)
    assert Skewed().blocks(K2, tokens, 8) >= Uniform().blocks(K2, tokens, 8) - 1e-9


def test_blocks_are_those_of_the_kernel_for_few_tokens() -> None:
    assert FEW_PAIRS == FEW
