"""How many experts a step touches: expected numbers of distinct experts and of token-expert pairs, on the fullest rank.

A decode step reads each expert that any of its tokens chose, once; where whole experts are spread over ranks, all wait
for the rank that has most of them.
"""

from __future__ import annotations

from functools import lru_cache
from math import comb, log, sqrt
from typing import Protocol

import numpy as np

from headrace.mesh import FloatArray
from headrace.spec import MoeSpec

SKEW = 0.5
"""Exponent of the power law of popularity under which published times of a K2 layer with power-law routing, 8 to 256
tokens on RTX PRO 6000, are nearest to the bytes that it reads."""
MOST_EXACT = 1024
"""Experts up to which the exact distribution stays within the range of a float."""
SURE = 1e-12
"""Chance that an expert is still untouched, below which all are touched."""


class Routing(Protocol):
    """Who chooses which experts."""

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """Expected distinct experts of `tokens` tokens on the fullest of `ranks` ranks, which hold as many each."""
        ...

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """Expected pairs of a token and an expert on the fullest rank."""
        ...


class Uniform:
    """Every token draws its experts afresh, all equally likely: E (1 - (1 - k/E)^b) of E on one rank."""

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        num_experts, top_k = moe.num_experts, moe.top_k
        if ranks == 1:
            return num_experts * (1 - (1 - top_k / num_experts) ** tokens)
        if (1 - top_k / num_experts) ** tokens < SURE:
            return num_experts / ranks
        if num_experts > MOST_EXACT:
            touched = np.full(num_experts, 1 - (1 - top_k / num_experts) ** tokens)
            return _fullest_of(touched.reshape(ranks, -1))
        return float(_num_distinct(num_experts, top_k, tokens) @ _fullest_given(num_experts, ranks))

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """The mean, and the largest of so many deviations of a binomial."""
        total, share = tokens * moe.top_k, 1 / ranks
        above = sqrt(2 * log(ranks) * total * share * (1 - share))
        return min(total, total * share + above)


class Skewed:
    """Experts are as popular as a power law says, those of a rank being any; a token never draws one twice."""

    def __init__(self, exponent: float = SKEW) -> None:
        self.exponent = exponent

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        touched = 1 - (1 - _popularity(moe.num_experts, moe.top_k, self.exponent)) ** tokens
        return float(touched.sum()) if ranks == 1 else _fullest_of(touched.reshape(ranks, -1))

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        chosen = _popularity(moe.num_experts, moe.top_k, self.exponent).reshape(ranks, -1)
        return float(tokens * chosen.sum(axis=1).max())


@lru_cache(maxsize=64)
def _popularity(num_experts: int, top_k: int, exponent: float) -> FloatArray:
    """[E]: the chance that a token has each expert among its k.

    Drawing k without repeats by weight is the same as letting each expert ring after a time that is exponential in its
    weight, and taking the first k: so expert e is among them with 1 - exp(-w_e t), t such that k rang (Efraimidis and
    Spirakis 2006, https://doi.org/10.1016/j.ipl.2005.11.003). Which ids are popular is drawn once, always the same.
    """
    weights = np.arange(1, num_experts + 1) ** -exponent
    low, high = 0.0, 1.0
    while (1 - np.exp(-weights * high)).sum() < top_k * (1 - 1e-9):
        high *= 2
        if high > 1e12:  # all experts are chosen
            return np.ones(num_experts)
    for _ in range(100):
        middle = (low + high) / 2
        if (1 - np.exp(-weights * middle)).sum() < top_k:
            low = middle
        else:
            high = middle
    chances: FloatArray = 1 - np.exp(-weights * high)
    return np.random.default_rng(0).permutation(chances)


def _fullest_of(touched_RN: FloatArray) -> float:
    """Expected maximum over ranks of how many of their experts are touched, each with its own chance, independently."""
    most = np.ones(touched_RN.shape[1] + 1)
    for chances in touched_RN:
        counts = np.ones(1)
        for chance in chances:
            counts = np.convolve(counts, (1 - chance, chance))
        most *= np.minimum(1.0, counts.cumsum())
    return float((1 - most[:-1]).sum())


def _num_distinct(num_experts: int, top_k: int, tokens: int) -> FloatArray:
    """[E + 1]: the chance of each number of distinct experts after so many tokens, each drawing k without repeats."""
    steps = _chain(num_experts, top_k)
    gains = _gains(num_experts, top_k)
    while len(steps) <= tokens:
        after = np.zeros(num_experts + 1)
        for new, chance in enumerate(gains):
            after[new:] += (steps[-1] * chance)[: num_experts + 1 - new]
        steps.append(after)
    return steps[tokens]


@lru_cache(maxsize=64)
def _chain(num_experts: int, top_k: int) -> list[FloatArray]:
    """Distributions by number of tokens, as far as anyone asked; before the first token none is touched."""
    return [np.eye(1, num_experts + 1)[0]]


@lru_cache(maxsize=64)
def _gains(num_experts: int, top_k: int) -> list[FloatArray]:
    """For n = 0..k, [E + 1]: the chance that a token adds n experts to so many distinct ones."""
    total = comb(num_experts, top_k)
    return [
        np.array([comb(had, top_k - new) * comb(num_experts - had, new) / total for had in range(num_experts + 1)])
        for new in range(top_k + 1)
    ]


@lru_cache(maxsize=64)
def _fullest_given(num_experts: int, ranks: int) -> FloatArray:
    """[E + 1]: expected maximum over ranks of their touched experts, given how many are touched in all.

    Given d, every set of d is as likely, so the chance that no rank has more than m is the coefficient of x^d in
    (sum over j <= m of C(E/R, j) x^j)^R, over C(E, d). Both are scaled by 2^-E.
    """
    each = num_experts // ranks
    one = np.array([comb(each, j) / 2**each for j in range(each + 1)])
    all_sets = np.array([comb(num_experts, d) / 2**num_experts for d in range(num_experts + 1)])
    expected = np.zeros(num_experts + 1)
    for most in range(each):
        ways = np.ones(1)
        for _ in range(ranks):
            ways = np.convolve(ways, one[: most + 1])
        within = np.zeros(num_experts + 1)
        within[: len(ways)] = ways
        expected += 1 - within / all_sets
    return expected
