from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.plan.experts import Routing, Skewed, Uniform, _fullest_of
from headrace.spec import MoeSpec

K2 = MoeSpec(num_experts=384, top_k=8, intermediate=2048)
SMALL = MoeSpec(num_experts=6, top_k=2, intermediate=8)


def test_distinct_experts_of_one_rank_are_the_formula() -> None:
    assert Uniform().distinct(K2, 1, 1) == pytest.approx(8)
    assert Uniform().distinct(K2, 4, 1) == pytest.approx(384 * (1 - (1 - 8 / 384) ** 4))
    assert Uniform().distinct(K2, 8192, 1) == pytest.approx(384)


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_the_fullest_rank_against_every_way_to_choose(ranks: int, tokens: int) -> None:
    each = SMALL.num_experts // ranks
    choices = list(itertools.combinations(range(SMALL.num_experts), SMALL.top_k))
    most = [
        max(np.bincount([expert // each for expert in set().union(*drawn)], minlength=ranks))
        for drawn in itertools.product(choices, repeat=tokens)
    ]
    assert Uniform().distinct(SMALL, tokens, ranks) == pytest.approx(float(np.mean(most)))


@pytest.mark.parametrize(("tokens", "ranks"), [(1, 8), (16, 4), (128, 8)])
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


def test_more_experts_than_can_be_counted_exactly() -> None:
    many = MoeSpec(num_experts=2048, top_k=8, intermediate=8)
    found = Uniform().distinct(many, 128, 8)
    assert many.num_experts * (1 - (1 - 8 / 2048) ** 128) / 8 < found < 1.2 * 128
    assert found == pytest.approx(112, rel=0.02)  # as 400 draws had it


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


def test_a_token_that_chooses_all() -> None:
    dense = MoeSpec(num_experts=4, top_k=4, intermediate=8)
    assert Uniform().distinct(dense, 1, 2) == pytest.approx(2)
    assert Skewed().distinct(dense, 1, 2) == pytest.approx(2)


def test_the_maximum_of_independent_counts() -> None:
    # Two ranks of one expert each, each touched with 1/2: the fullest has one in three of four cases.
    assert _fullest_of(np.array([[0.5], [0.5]])) == pytest.approx(0.75)
